"""The kernel of paths.py: one program for each path of each sequence, which finds how the text goes on and how likely that is.

Shapes: B sequences, M matches, P = M + 1 paths, D tokens of a path, C classes, L lengths, G groups of depths.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.attention.kernels.tables_triton import slots_of
from specdec.batch.tree import DraftTree
from specdec.draft.join.survival import FIRST_DEPTHS, LENGTHS, MATCHES, WEIGHT, classes_of_paths, prior_rates
from specdec.draft.ngram.lookup import SHIFT, PagedTexts
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


@triton.jit(
    do_not_specialize=["stride_row", "depth", "room", "levels", "num_nodes"],
    do_not_specialize_on_alignment=["page_table", "lens"],
)
def paths_kernel(
    page_table,  # [B, pages] int32
    lens,  # [B] int32
    text,  # [slots] int32
    keys,  # [B, M] int64
    tree_tokens,  # [B, N] int64
    counts,  # [C, L, G, 2] int32
    prior,  # [C, L, G] float32
    classes,  # [P] int64
    tokens,  # [B, P, room] int64
    lengths,  # [B, P] int64
    steps,  # [B, P, D] float32
    stride_row,
    depth,  # D
    room,
    levels,  # of the tree, a chain
    num_nodes,  # N
    MATCHES: tl.constexpr,
    IS_CHAIN: tl.constexpr,  # whether the tree is a chain without scores, and so a path
    BITS: tl.constexpr,  # SHIFT
    LENGTHS: tl.constexpr,
    FIRSTS: tl.constexpr,
    WEIGHT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    b, p = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d_D = tl.arange(0, BLOCK)
    ok_D = d_D < depth
    path = b * (MATCHES + 1) + p
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    length = tl.zeros([], tl.int64)
    token_D = tl.full([BLOCK], -1, tl.int64)
    if p == MATCHES:
        if IS_CHAIN:
            token_D = tl.load(tree_tokens + b * num_nodes + 1 + d_D, mask=d_D < levels, other=-1)
    else:
        low = (tl.full([], 1, tl.int64) << BITS) - 1
        last = tl.maximum(tl.load(lens + b).to(tl.int64) - 1, 0)
        first_key, own_key = tl.load(keys + b * MATCHES), tl.load(keys + b * MATCHES + p)
        key = tl.where(own_key >= 0, own_key, first_key)
        end = tl.where(first_key >= 0, key & low, last - 1)
        length = tl.maximum(own_key >> BITS, 0)
        position_D = end + 1 + d_D % tl.maximum(last - end, 1)
        position_D = tl.minimum(tl.maximum(position_D, 0), last)
        slot_D = slots_of(page_table + b * stride_row, position_D, ok_D, PAGE_SIZE)
        token_D = tl.where(ok_D, tl.load(text + slot_D, mask=ok_D, other=0).to(tl.int64), -1)
    tl.store(tokens + path * room + d_D, token_D, mask=d_D < room)
    tl.store(lengths + path, length)
    cell_D = (tl.load(classes + p) * LENGTHS + tl.minimum(length, LENGTHS - 1)) * len(FIRSTS) + groups_of_depths(d_D, FIRSTS)
    trials_D, accepted_D = tl.load(counts + 2 * cell_D), tl.load(counts + 2 * cell_D + 1)
    rate_D = (accepted_D.to(tl.float32) + WEIGHT * tl.load(prior + cell_D)) / (trials_D.to(tl.float32) + WEIGHT)
    tl.store(steps + path * depth + d_D, tl.log(rate_D), mask=ok_D)


def launch_paths(text: PagedTexts, keys_BM: Tensor, tree: DraftTree, counts_CLG2: Tensor, depth: int, out: Paths) -> Tensor:
    """`paths.find_paths`, once the places are found."""
    (B, M), pages, device = keys_BM.shape, text.pages, keys_BM.device
    room = out.tokens_BPD.shape[2]
    assert M == MATCHES and pages.table.stride(1) == 1 and depth <= room and keys_BM.is_contiguous()
    assert out.tokens_BPD.is_contiguous() and out.lengths_BP.is_contiguous() and tree.tokens_BN.is_contiguous()
    steps_BPD = torch.empty(B, M + 1, depth, dtype=torch.float32, device=device)
    paths_kernel[(B, M + 1)](
        pages.table, text.lens_B, text.tokens_N, keys_BM, tree.tokens_BN, counts_CLG2, prior_rates(device),
        classes_of_paths(device), out.tokens_BPD, out.lengths_BP, steps_BPD,
        pages.table.stride(0), depth, room, tree.max_depth, tree.num_nodes,
        MATCHES=M, IS_CHAIN=tree.scores_BN is None, BITS=SHIFT, LENGTHS=LENGTHS, FIRSTS=FIRST_DEPTHS, WEIGHT=WEIGHT,
        PAGE_SIZE=pages.page_size, BLOCK=max(16, triton.next_power_of_2(room)), num_warps=1, **chained(device),
    )  # fmt: skip
    return steps_BPD
