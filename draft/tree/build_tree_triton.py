"""The kernel of build_tree.py: one program for each sequence, which holds the candidates' scores in registers.

The kernel does not sort.  It finds the score of the last chosen candidate bit by bit, counting how many candidates reach each
trial value.  A candidate's place among the chosen ones is then a running sum.

Shapes: B sequences, C candidates (padded), N nodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.topk_triton import LOWEST_32, ordered_32

if TYPE_CHECKING:
    from specdec.draft.tree.expand import Candidates


@triton.jit(do_not_specialize=["stride_b", "count", "num_nodes", "stride_root"], do_not_specialize_on_alignment=["root"])
def best_nodes_kernel(
    candidate_tokens,  # [B, C] int64
    candidate_scores,  # [B, C] float32
    candidate_parents,  # [B, C] int64, -1: the root
    root,  # [B] int64
    tokens,  # [B, N] int64
    parents,  # [B, N] int64
    scores,  # [B, N] float32
    sources,  # [B, N] int64 if BITS
    stride_b,
    count,  # candidates
    num_nodes,  # N
    stride_root,
    BITS: tl.constexpr,  # how many bits of a candidate's token are the token, if its sources stand above; 0: all
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BLOCK)
    ok_C = c < count
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    score_C = tl.load(candidate_scores + b * stride_b + c, mask=ok_C, other=-float("inf"))
    token_C = tl.load(candidate_tokens + b * stride_b + c, mask=ok_C, other=0)
    parent_C = tl.load(candidate_parents + b * stride_b + c, mask=ok_C, other=0).to(tl.int32)
    score_C = tl.where(score_C != score_C, -float("inf"), score_C)  # no number: the lowest, as in the definition
    value_C = tl.where(ok_C, ordered_32(score_C), LOWEST_32)

    wanted = num_nodes - 1
    last = tl.full([], LOWEST_32, tl.int32)  # becomes the largest value that at least `wanted` candidates reach
    for i in range(32):
        higher = last ^ (tl.full([], 1, tl.int32) << (31 - i))  # sets the bit; flipping the sign bit of LOWEST_32 gives 0
        reach = tl.sum((value_C >= higher).to(tl.int32), 0)
        last = tl.where(reach >= wanted, higher, last)
    above_C = value_C > last
    level_C = (value_C == last) & ok_C
    room = wanted - tl.sum(above_C.to(tl.int32), 0)
    chosen_C = above_C | (level_C & (tl.cumsum(level_C.to(tl.int32), 0) <= room))  # ties: the lowest indices
    node_C = tl.cumsum(chosen_C.to(tl.int32), 0)
    above_node_C = tl.where(parent_C < 0, 0, tl.gather(node_C, tl.maximum(parent_C, 0), 0))

    tokens += b * num_nodes
    parents += b * num_nodes
    scores += b * num_nodes
    tl.store(scores + node_C, score_C, mask=chosen_C)
    tl.store(scores, 0.0)
    if BITS:
        tl.store(sources + b * num_nodes + node_C, token_C >> BITS, mask=chosen_C)
        tl.store(sources + b * num_nodes, tl.zeros([], tl.int64))
        token_C = token_C & ((tl.full([], 1, tl.int64) << BITS) - 1)
    tl.store(tokens + node_C, token_C, mask=chosen_C)
    tl.store(parents + node_C, above_node_C.to(tl.int64), mask=chosen_C)
    tl.store(tokens, tl.load(root + b * stride_root))
    tl.store(parents, tl.zeros([], tl.int64))


def launch_best_nodes(
    candidates: Candidates, root_B: Tensor, num_nodes: int, bits: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`build_tree.best_nodes`: (tokens_BN, parents_BN), int64, scores_BN, float32, and with `bits` sources_BN, int64."""
    B, C = candidates.scores_BC.shape
    assert num_nodes - 1 <= C
    tokens_BN, parents_BN = (torch.empty(B, num_nodes, dtype=torch.int64, device=root_B.device) for _ in range(2))
    scores_BN = torch.empty(B, num_nodes, dtype=torch.float32, device=root_B.device)
    sources_BN = torch.empty_like(tokens_BN) if bits else None
    block = max(32, triton.next_power_of_2(C))
    best_nodes_kernel[(B,)](
        candidates.tokens_BC, candidates.scores_BC, candidates.parents_BC, root_B, tokens_BN, parents_BN,
        scores_BN, tokens_BN if sources_BN is None else sources_BN,
        candidates.scores_BC.stride(0), C, num_nodes, root_B.stride(0),
        BITS=bits, BLOCK=block, num_warps=max(1, min(16, block // 256)), **chained(root_B.device),
    )  # fmt: skip
    return tokens_BN, parents_BN, scores_BN, sources_BN
