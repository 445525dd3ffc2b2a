"""The kernel of grow.py: one warp for each sequence takes the best node again and again.

The frontier holds nodes whose parents are taken already: of each taken node its first child, and the next sibling of each
taken child.  All other nodes come after one of these in the order, so the best of the frontier is the next node of the tree.

A node's key has two halves: its score, and its level, its parent's number and its rank among its siblings, inverted.  So the
largest key is the first node in the order.  Halves have 32 bits, of which a warp finds the largest with one instruction.

Shapes: B sequences, S levels, K tokens of a level, N nodes with the root, F places of the frontier.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.topk_triton import LOWEST_32, ordered_32

MIN_SCORE = tl.constexpr(-1e30)
TIES = tl.constexpr(0x7FFFFFFF)
LEVEL, PARENT = tl.constexpr(1 << 20), tl.constexpr(1 << 8)  # how far levels and parents stand above ranks in a key


@triton.jit
def _place(level, parent, rank):
    return TIES - (level * LEVEL + parent * PARENT + rank)


@triton.jit
def _logp(logp, at):
    value = tl.load(logp + at)
    return tl.where(value >= MIN_SCORE, value, MIN_SCORE)


@triton.jit(do_not_specialize=["levels", "num_nodes"])
def best_paths_kernel(
    logp,  # [B, S, K] float32
    token,  # [B, S, K] int64
    root,  # [B] int64
    tokens,  # [B, N] int64
    parents,  # [B, N] int64
    scores,  # [B, N] float32
    levels,  # S
    num_nodes,  # N
    K: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, PADDED)
    logp += b * levels * K
    token += b * levels * K
    tokens += b * num_nodes
    parents += b * num_nodes
    scores += b * num_nodes
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tl.store(tokens, tl.load(root + b))
    tl.store(parents, tl.zeros([], tl.int64))
    tl.store(scores, 0.0)
    none = tl.full([], 0, tl.int32)
    score_F = tl.where(place == 0, ordered_32(_logp(logp, 0)), LOWEST_32)
    place_F = tl.where(place == 0, _place(none, none, none), -1)
    base_F = tl.zeros([PADDED], tl.int32)  # the bits of the score of each place's parent
    for number in range(1, num_nodes):
        best = tl.max(score_F, 0)
        first = tl.max(tl.where(score_F == best, place_F, -1), 0)
        is_best_F = (score_F == best) & (place_F == first)
        base = tl.sum(tl.where(is_best_F, base_F, 0), 0).to(tl.float32, bitcast=True)
        score = (best ^ ((best >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        ties = TIES - first
        level, parent, rank = ties // LEVEL, (ties % LEVEL) // PARENT, ties % PARENT
        tl.store(tokens + number, tl.load(token + level * K + rank))
        tl.store(parents + number, parent.to(tl.int64))
        tl.store(scores + number, score)
        has_next, goes_on = rank + 1 < K, level + 1 < levels
        sibling = base + _logp(logp, tl.where(has_next, level * K + rank + 1, 0))
        child = score + _logp(logp, tl.where(goes_on, (level + 1) * K, 0))
        score_F = tl.where(is_best_F, tl.where(has_next, ordered_32(sibling), LOWEST_32), score_F)
        place_F = tl.where(is_best_F, tl.where(has_next, _place(level, parent, rank + 1), -1), place_F)
        is_new_F = place == number
        score_F = tl.where(is_new_F, tl.where(goes_on, ordered_32(child), LOWEST_32), score_F)
        place_F = tl.where(is_new_F, tl.where(goes_on, _place(level + 1, number, none), -1), place_F)
        base_F = tl.where(is_new_F, score.to(tl.int32, bitcast=True), base_F)


def launch_best_paths(logp_BSK: Tensor, tokens_BSK: Tensor, root_B: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """`grow.best_paths`: (tokens_BN, parents_BN), int64, and scores_BN, float32."""
    B, S, K = logp_BSK.shape
    assert logp_BSK.is_contiguous() and tokens_BSK.is_contiguous() and root_B.is_contiguous()
    tokens_BN, parents_BN = (torch.empty(B, num_nodes, dtype=torch.int64, device=root_B.device) for _ in range(2))
    scores_BN = torch.empty(B, num_nodes, dtype=torch.float32, device=root_B.device)
    best_paths_kernel[(B,)](
        logp_BSK, tokens_BSK, root_B, tokens_BN, parents_BN, scores_BN, S, num_nodes,
        K=K, PADDED=max(32, triton.next_power_of_2(num_nodes)), num_warps=1, **chained(root_B.device),
    )  # fmt: skip
    return tokens_BN, parents_BN, scores_BN
