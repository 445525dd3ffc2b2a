"""The kernel of paths.py: one program for each path of each sequence, which walks it down the drafter's tree, and says how
likely its tokens are.

Shapes: B sequences, P paths, D tokens of a path, C classes, L lengths, K kinds of support, G groups of depths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.batch.tree import DraftTree
from specdec.draft.join.survival import FIRST_DEPTHS, LENGTHS, ONCE, SUPPORTS, WEIGHT, Survival
from specdec.ops.launch import chained

if TYPE_CHECKING:
    from specdec.draft.join.paths import Paths


@triton.jit
def groups_of_steps(d_D, parts, FIRSTS: tl.constexpr):
    """int32: the group of each step.  parts: the depth of the one that parts.  FIRSTS: the first depth of each group."""
    group_D = tl.zeros_like(d_D) - 1
    for i in tl.static_range(len(FIRSTS)):
        group_D += (d_D >= FIRSTS[i]).to(tl.int32)
    return group_D + len(FIRSTS) * (d_D == parts).to(tl.int32)


@triton.jit(do_not_specialize=["depth", "room", "levels", "searched", "num_nodes", "stride_parents"])
def rates_kernel(
    tree_tokens,  # [B, N] int64
    tree_parents,  # [B, N] int64
    counts,  # [C, L, K, G, 2] int32
    prior,  # [C, L, K, G] float32
    classes,  # [P] int64
    tokens,  # [B, P, room] int64
    lengths,  # [B, P] int64
    support,  # [B, P] int64
    parts,  # [B, P] int64
    steps,  # [B, P, D] float32
    depth,  # D
    room,
    levels,  # of the tree, a chain
    searched,  # levels in which a path may be in the tree
    num_nodes,  # N
    stride_parents,
    NODES: tl.constexpr,  # padded
    IS_CHAIN: tl.constexpr,  # whether the tree is a chain without scores, and so the last path
    LENGTHS: tl.constexpr,
    SUPPORTS: tl.constexpr,
    ALONE: tl.constexpr,  # ONCE
    FIRSTS: tl.constexpr,
    WEIGHT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    b, p, P = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    d_D = tl.arange(0, BLOCK)
    path = b * P + p
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    length, kind, parting = tl.zeros([], tl.int64), tl.full([], ALONE, tl.int64), tl.full([], -1, tl.int32)
    if p == P - 1:
        token_D = tl.full([BLOCK], -1, tl.int64)
        if IS_CHAIN:
            token_D = tl.load(tree_tokens + b * num_nodes + 1 + d_D, mask=d_D < levels, other=-1)
        tl.store(tokens + path * room + d_D, token_D, mask=d_D < room)
        tl.store(lengths + path, length)
        tl.store(support + path, kind)
    else:
        length, kind = tl.load(lengths + path), tl.load(support + path)
        n = tl.arange(0, NODES)
        ok_N = (n > 0) & (n < num_nodes)
        token_N = tl.load(tree_tokens + b * num_nodes + n, mask=ok_N, other=-2)
        parent_N = tl.load(tree_parents + b * stride_parents + n, mask=ok_N, other=-1).to(tl.int32)
        at, inside, goes_on = tl.zeros([], tl.int32), tl.zeros([], tl.int32), tl.full([], 1, tl.int32)
        for level in range(searched):
            child = tl.max(tl.where((parent_N == at) & (token_N == tl.load(tokens + path * room + level)), n, -1), 0)
            goes_on = tl.where(child >= 0, goes_on, 0)
            at = tl.where(goes_on > 0, child, at)
            inside += goes_on
        parting = tl.where(tl.max((parent_N == at).to(tl.int32), 0) > 0, inside, -1)
    tl.store(parts + path, parting.to(tl.int64))
    length = tl.minimum(tl.maximum(length, 0), LENGTHS - 1)
    cell = (tl.load(classes + p) * LENGTHS + length) * SUPPORTS + kind
    cell_D = cell * 2 * len(FIRSTS) + groups_of_steps(d_D, parting, FIRSTS)
    trials_D, accepted_D = tl.load(counts + 2 * cell_D), tl.load(counts + 2 * cell_D + 1)
    rate_D = (accepted_D.to(tl.float32) + WEIGHT * tl.load(prior + cell_D)) / (trials_D.to(tl.float32) + WEIGHT)
    tl.store(steps + path * depth + d_D, tl.log(rate_D), mask=d_D < depth)


def launch_rates(paths: Paths, tree: DraftTree, survival: Survival, depth: int) -> Tensor:
    """`paths.end_paths`."""
    tokens_BPD, lengths_BP, support_BP, classes_P, parts_BP = paths
    B, P, room = tokens_BPD.shape
    assert depth <= room and tokens_BPD.is_contiguous() and lengths_BP.is_contiguous() and tree.tokens_BN.is_contiguous()
    assert parts_BP.is_contiguous() and support_BP.is_contiguous() and tree.parents_BN.stride(1) == 1
    steps_BPD = torch.empty(B, P, depth, dtype=torch.float32, device=tokens_BPD.device)
    rates_kernel[(B, P)](
        tree.tokens_BN, tree.parents_BN, survival.counts_CLKG2, survival.prior_CLKG, classes_P,
        tokens_BPD, lengths_BP, support_BP, parts_BP, steps_BPD,
        depth, room, tree.max_depth, min(tree.max_depth, depth), tree.num_nodes, tree.parents_BN.stride(0),
        NODES=max(16, triton.next_power_of_2(tree.num_nodes)),
        IS_CHAIN=tree.scores_BN is None, LENGTHS=LENGTHS, SUPPORTS=SUPPORTS, ALONE=ONCE, FIRSTS=FIRST_DEPTHS, WEIGHT=WEIGHT,
        BLOCK=max(16, triton.next_power_of_2(room)), num_warps=1, **chained(tokens_BPD.device),
    )  # fmt: skip
    return steps_BPD
