"""The kernel of paths.py: one program for each path of each sequence, which says how likely its tokens are.

Shapes: B sequences, P paths, D tokens of a path, C classes, L lengths, G groups of depths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.batch.tree import DraftTree
from specdec.draft.join.survival import FIRST_DEPTHS, LENGTHS, WEIGHT, Survival
from specdec.ops.launch import chained

if TYPE_CHECKING:
    from specdec.draft.join.paths import Paths


@triton.jit
def groups_of_depths(d_D, FIRSTS: tl.constexpr):
    """int32: the group of each depth; FIRSTS: the first depth of each."""
    group_D = tl.zeros_like(d_D) - 1
    for i in tl.static_range(len(FIRSTS)):
        group_D += (d_D >= FIRSTS[i]).to(tl.int32)
    return group_D


@triton.jit(do_not_specialize=["depth", "room", "levels", "num_nodes"])
def rates_kernel(
    tree_tokens,  # [B, N] int64
    counts,  # [C, L, G, 2] int32
    prior,  # [C, L, G] float32
    classes,  # [P] int64
    tokens,  # [B, P, room] int64
    lengths,  # [B, P] int64
    steps,  # [B, P, D] float32
    depth,  # D
    room,
    levels,  # of the tree, a chain
    num_nodes,  # N
    IS_CHAIN: tl.constexpr,  # whether the tree is a chain without scores, and so the last path
    LENGTHS: tl.constexpr,
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
    length = tl.zeros([], tl.int64)
    if p == P - 1:
        token_D = tl.full([BLOCK], -1, tl.int64)
        if IS_CHAIN:
            token_D = tl.load(tree_tokens + b * num_nodes + 1 + d_D, mask=d_D < levels, other=-1)
        tl.store(tokens + path * room + d_D, token_D, mask=d_D < room)
        tl.store(lengths + path, length)
    else:
        length = tl.load(lengths + path)
    length = tl.minimum(tl.maximum(length, 0), LENGTHS - 1)
    cell_D = (tl.load(classes + p) * LENGTHS + length) * len(FIRSTS) + groups_of_depths(d_D, FIRSTS)
    trials_D, accepted_D = tl.load(counts + 2 * cell_D), tl.load(counts + 2 * cell_D + 1)
    rate_D = (accepted_D.to(tl.float32) + WEIGHT * tl.load(prior + cell_D)) / (trials_D.to(tl.float32) + WEIGHT)
    tl.store(steps + path * depth + d_D, tl.log(rate_D), mask=d_D < depth)


def launch_rates(paths: Paths, tree: DraftTree, survival: Survival, depth: int) -> Tensor:
    """`paths.end_paths`."""
    tokens_BPD, lengths_BP, classes_P = paths
    B, P, room = tokens_BPD.shape
    assert depth <= room and tokens_BPD.is_contiguous() and lengths_BP.is_contiguous() and tree.tokens_BN.is_contiguous()
    steps_BPD = torch.empty(B, P, depth, dtype=torch.float32, device=tokens_BPD.device)
    rates_kernel[(B, P)](
        tree.tokens_BN, survival.counts_CLG2, survival.prior_CLG, classes_P, tokens_BPD, lengths_BP, steps_BPD,
        depth, room, tree.max_depth, tree.num_nodes,
        IS_CHAIN=tree.scores_BN is None, LENGTHS=LENGTHS, FIRSTS=FIRST_DEPTHS, WEIGHT=WEIGHT,
        BLOCK=max(16, triton.next_power_of_2(room)), num_warps=1, **chained(tokens_BPD.device),
    )  # fmt: skip
    return steps_BPD
