"""The kernels of join.py: one program for each sequence, which holds the drafter's tree and all paths in registers.

Of trees it walks each path down the tree, a level a step; raises what the tree's nodes are expected to be worth; and gives each
place of a path that is a new node its score.  Of chains it chooses a path.

Shapes: B sequences, N nodes of the drafter's tree, M = N - 1, P paths of each, D tokens of a path, C = M + P * D candidates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.batch.tree import DraftTree
from specdec.draft.join.join import SHIFT
from specdec.draft.tree.expand import Candidates
from specdec.ops.launch import chained

MIN_SCORE = tl.constexpr(-1e30)


@triton.jit(do_not_specialize=["num_nodes", "depth", "room", "levels", "searched"])
def join_kernel(
    tree_tokens,  # [B, N] int64
    tree_parents,  # [B, N] int64
    tree_scores,  # [B, N] float32 if HAS_SCORES
    path_tokens,  # [B, P + 1, room] int64
    path_steps,  # [B, P + 1, D] float32; of the last one the steps of a chain without scores
    path_bits,  # [P + 1] int64
    tokens,  # [B, C] int64
    scores,  # [B, C] float32
    parents,  # [B, C] int64
    num_nodes,  # N
    depth,  # D
    room,
    levels,  # of the tree
    searched,  # levels in which a path may be in the tree
    stride_parents,
    PATHS: tl.constexpr,
    PADDED: tl.constexpr,  # of paths
    NODES: tl.constexpr,  # padded
    BLOCK: tl.constexpr,  # of depths
    HAS_SCORES: tl.constexpr,
    BITS: tl.constexpr,  # join.SHIFT
    PDL: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    n, d, p_P = tl.arange(0, NODES), tl.arange(0, BLOCK), tl.arange(0, PADDED)
    ok_N, ok_D = n < num_nodes, d < depth
    ok_PD = (p_P < PATHS)[:, None] & ok_D[None, :]
    path_tokens += b * (PATHS + 1) * room
    path_steps += b * (PATHS + 1) * depth
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token_N = tl.load(tree_tokens + b * num_nodes + n, mask=ok_N, other=-2)
    parent_N = tl.load(tree_parents + b * stride_parents + n, mask=ok_N, other=0).to(tl.int32)
    if HAS_SCORES:
        score_N = tl.load(tree_scores + b * num_nodes + n, mask=ok_N, other=0.0)
        score_N = tl.where(score_N >= MIN_SCORE, tl.minimum(score_N, 0.0), MIN_SCORE)  # no number: the lowest
        own_N = tl.minimum(score_N - tl.gather(score_N, parent_N, 0), 0.0)
    else:
        own_N = tl.load(path_steps + PATHS * depth + n - 1, mask=ok_N & (n > 0), other=0.0)
    token_PD = tl.load(path_tokens + p_P[:, None] * room + d[None, :], mask=ok_PD, other=-1)
    step_PD = tl.load(path_steps + p_P[:, None] * depth + d[None, :], mask=ok_PD, other=0.0)

    source_N = tl.full([NODES], 1, tl.int64)  # join.DRAFTER
    source_PD = tl.load(path_bits + p_P, mask=p_P < PATHS, other=0)[:, None] + tl.zeros([PADDED, BLOCK], tl.int64)
    at_P, inside_P = tl.zeros([PADDED], tl.int32), tl.zeros([PADDED], tl.int32)
    for p in range(PATHS):
        at, inside, goes_on = tl.zeros([], tl.int32), tl.zeros([], tl.int32), tl.full([], 1, tl.int32)
        for level in range(searched):
            token = tl.load(path_tokens + p * room + level)
            step = tl.load(path_steps + p * depth + level)
            is_child_N = (parent_N == at) & (token_N == token) & ok_N & (n > 0)
            child = tl.max(tl.where(is_child_N, n, -1), 0)
            goes_on = tl.where(child >= 0, goes_on, 0)
            own_N = tl.where((n == child) & (goes_on > 0), tl.maximum(own_N, step), own_N)
            source_N = tl.where((n == child) & (goes_on > 0), source_N | tl.load(path_bits + p), source_N)
            at = tl.where(goes_on > 0, child, at)
            inside += goes_on
        at_P, inside_P = tl.where(p_P == p, at, at_P), tl.where(p_P == p, inside, inside_P)
    own_N = tl.where(ok_N & (n > 0), own_N, 0.0)
    raised_N = tl.zeros([NODES], tl.float32)
    for _ in range(levels):
        raised_N = tl.maximum(tl.gather(raised_N, parent_N, 0) + own_N, MIN_SCORE)

    M = num_nodes - 1
    out = b * (M + PATHS * depth)
    is_node_N = ok_N & (n > 0)
    tl.store(tokens + out + n - 1, token_N | (source_N << BITS), mask=is_node_N)
    tl.store(scores + out + n - 1, raised_N, mask=is_node_N)
    tl.store(parents + out + n - 1, (parent_N - 1).to(tl.int64), mask=is_node_N)

    score_PD = tl.full([PADDED, BLOCK], -float("inf"), tl.float32)
    for p in range(PATHS):
        token_D = tl.sum(tl.where(p_P[:, None] == p, token_PD, 0), 0)
        at, inside = tl.sum(tl.where(p_P == p, at_P, 0), 0), tl.sum(tl.where(p_P == p, inside_P, 0), 0)
        differs_PD = ((token_PD != token_D[None, :]) & ok_D[None, :]).to(tl.int32)
        alike_PD = (tl.cumsum(differs_PD, 1) == 0) & ok_D[None, :]
        # A step that paths share is the largest of theirs.
        agreed_PD = tl.where(alike_PD & (p_P < PATHS)[:, None], step_PD, -float("inf"))
        sum_D = tl.cumsum(tl.where(ok_D, tl.max(agreed_PD, 0), 0.0), 0)
        source_PD = tl.where(alike_PD & (p_P < p)[:, None], source_PD | tl.load(path_bits + p), source_PD)
        alike_P = tl.where(p_P < p, tl.sum(alike_PD.to(tl.int32), 1), 0)
        shared = tl.max(alike_P, 0)  # tokens that an earlier path has too, and
        first = tl.min(tl.where((alike_P == shared) & (p_P < p), p_P, PADDED), 0)  # the first path that has them
        start, goes_on = tl.maximum(inside, shared), shared > inside
        in_tree = tl.sum(tl.where(n == at, raised_N, 0.0), 0)
        is_before_PD = (p_P[:, None] == first) & (d[None, :] == shared - 1)
        in_path = tl.sum(tl.sum(tl.where(is_before_PD, score_PD, 0.0), 1), 0)
        before = tl.where(goes_on, in_path, in_tree)
        skipped = tl.sum(tl.where(d == start - 1, sum_D, 0.0), 0)
        new_D = tl.minimum(tl.maximum(before + sum_D - skipped, MIN_SCORE), before)  # rounding lifts no node above its parent
        new_D = tl.where((d >= start) & (token_D >= 0) & ok_D, new_D, -float("inf"))
        score_PD = tl.where(p_P[:, None] == p, new_D[None, :], score_PD)
        above_D = tl.where(d == start, tl.where(goes_on, M + first * depth + shared - 1, at - 1), M + p * depth + d - 1)
        place = out + M + p * depth + d
        tl.store(scores + place, new_D, mask=ok_D)
        tl.store(parents + place, tl.where(d >= start, above_D, -1).to(tl.int64), mask=ok_D)
    place_PD = out + M + p_P[:, None] * depth + d[None, :]
    tl.store(tokens + place_PD, token_PD | (source_PD << BITS), mask=ok_PD)


@triton.jit(do_not_specialize=["depth", "room", "steps"])
def join_chain_kernel(
    own_tokens,  # [B, depth + 1] int64, the root first
    path_tokens,  # [B, P, room] int64
    path_steps,  # [B, P, steps] float32
    path_bits,  # [P] int64
    tokens,  # [B, depth + 1] int64
    sources,  # [B, depth + 1] int64
    depth,  # tokens of the chain
    room,
    steps,
    PATHS: tl.constexpr,
    PADDED: tl.constexpr,  # of paths
    BLOCK: tl.constexpr,  # of depths
    PDL: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    d, p_P = tl.arange(0, BLOCK), tl.arange(0, PADDED)
    ok_D, ok_P = d < depth, p_P < PATHS
    ok_PD = ok_P[:, None] & ok_D[None, :]
    at, out = b * PATHS + p_P[:, None], b * (depth + 1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token_PD = tl.load(path_tokens + at * room + d[None, :], mask=ok_PD, other=-1)
    step_PD = tl.load(path_steps + at * steps + d[None, :], mask=ok_PD, other=0.0)
    own_D = tl.load(own_tokens + out + 1 + d, mask=ok_D, other=-1)
    worth_P = tl.sum(tl.where(token_PD >= 0, tl.exp(tl.cumsum(step_PD, 1)), 0.0), 1)
    worth_P = tl.where(ok_P, worth_P, -1.0)
    best = tl.min(tl.where(worth_P == tl.max(worth_P, 0), p_P, PADDED), 0)  # the first one, as argmax has it
    best_D = tl.sum(tl.where(p_P[:, None] == best, token_PD, 0), 0)
    token_D = tl.where(best_D < 0, own_D, best_D)
    differs_PD = ((token_PD != token_D[None, :]) & ok_D[None, :]).to(tl.int32)
    alike_PD = (tl.cumsum(differs_PD, 1) == 0).to(tl.int32)
    source_D = (best_D < 0).to(tl.int64)  # join.DRAFTER
    for p in range(PATHS):
        alike_D = tl.sum(tl.where(p_P[:, None] == p, alike_PD, 0), 0)
        source_D = tl.where(alike_D > 0, source_D | tl.load(path_bits + p), source_D)
    tl.store(tokens + out + 1 + d, token_D, mask=ok_D)
    tl.store(sources + out + 1 + d, source_D, mask=ok_D)
    tl.store(tokens + out, tl.load(own_tokens + out))
    tl.store(sources + out, tl.zeros([], tl.int64))


def launch_joined_chain(tokens_BN: Tensor, tokens_BPD: Tensor, steps_BPD: Tensor, bits_P: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens, sources) of `join.joined_chain`: int64 [B, N].  tokens_BN: the drafter's."""
    (B, N), (_, P, D), device = tokens_BN.shape, steps_BPD.shape, tokens_BN.device
    assert tokens_BPD.is_contiguous() and steps_BPD.is_contiguous() and tokens_BN.is_contiguous() and bits_P.shape == (P,)
    assert N - 1 <= min(D, tokens_BPD.shape[2])
    out_tokens_BN, out_sources_BN = torch.empty_like(tokens_BN), torch.empty_like(tokens_BN)
    join_chain_kernel[(B,)](
        tokens_BN, tokens_BPD, steps_BPD, bits_P, out_tokens_BN, out_sources_BN, N - 1, tokens_BPD.shape[2], D,
        PATHS=P, PADDED=max(2, triton.next_power_of_2(P)), BLOCK=max(16, triton.next_power_of_2(N - 1)),
        num_warps=1, **chained(device),
    )  # fmt: skip
    return out_tokens_BN, out_sources_BN


def launch_candidates(tree: DraftTree, tokens_BPD: Tensor, steps_BPD: Tensor, bits_P: Tensor) -> Candidates:
    """The candidates of `join.joined_tree`.  tokens_BPD, steps_BPD: with a chain's path as the last one."""
    (B, N), (_, P, D), device = tree.tokens_BN.shape, steps_BPD.shape, tree.tokens_BN.device
    P, room, scores_BN = P - 1, tokens_BPD.shape[2], tree.scores_BN
    assert tokens_BPD.is_contiguous() and steps_BPD.is_contiguous() and tree.tokens_BN.is_contiguous()
    assert tree.parents_BN.stride(1) == 1 and (scores_BN is None or scores_BN.is_contiguous())
    assert scores_BN is not None or tree.is_chain, "a drafter that branches has scores"
    C = N - 1 + P * D
    out_tokens_BC, out_parents_BC = (torch.empty(B, C, dtype=torch.int64, device=device) for _ in range(2))
    out_scores_BC = torch.empty(B, C, dtype=torch.float32, device=device)
    join_kernel[(B,)](
        tree.tokens_BN, tree.parents_BN, steps_BPD if scores_BN is None else scores_BN, tokens_BPD, steps_BPD, bits_P,
        out_tokens_BC, out_scores_BC, out_parents_BC, N, D, room, tree.max_depth, min(tree.max_depth, D),
        tree.parents_BN.stride(0),
        PATHS=P, PADDED=max(2, triton.next_power_of_2(P)), NODES=max(16, triton.next_power_of_2(N)),
        BLOCK=max(16, triton.next_power_of_2(D)), HAS_SCORES=scores_BN is not None, BITS=SHIFT,
        num_warps=1, **chained(device),
    )  # fmt: skip
    return Candidates(out_tokens_BC, out_scores_BC, out_parents_BC)
