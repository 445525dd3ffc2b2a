"""The kernels of experts.py's `by_expert` and `place_pairs`: pairs of a token and an expert, sorted by expert.

Of few pairs one launch does it.  There is a program for each expert, and one for pairs that are skipped.  Each reads all
numbers of experts, counts those below its own, and writes its pairs after so many, in their order.

Of many pairs two launches do it.  In the first one each program counts the pairs that each expert has in its block; in the
second one it adds up the counts of the blocks before its own, and places its pairs after so many.

Order of chained launches (specdec/ops/launch.py): the kernels read nothing before their wait, and trigger after it.

Shapes: P pairs, E experts, B blocks of pairs, R tiles of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained

SIZES = 512, 4096, 8192  # pairs, padded: few sizes, for each of which the kernel is compiled
BLOCK = 512  # pairs that a program counts, or places
MAX_ONES = 16384  # places of the matrix of 0 and 1, of pairs and experts, that a program adds up at once


@triton.jit(do_not_specialize=["pairs"])
def by_expert_kernel(
    topk_ids,  # [P] int64: from 0 to E
    order,  # [P] int64
    counts,  # [E] int32
    pairs, EXPERTS: tl.constexpr, PADDED_PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, p = tl.program_id(0), tl.arange(0, PADDED_PAIRS)
    id_P = tl.load(topk_ids + p, mask=p < pairs, other=EXPERTS + 1).to(tl.int32)
    is_own_P = (id_P == expert).to(tl.int32)
    first = tl.sum((id_P < expert).to(tl.int32), 0)
    tl.store(order + first + tl.cumsum(is_own_P, 0) - 1, p.to(tl.int64), mask=is_own_P == 1)
    if expert < EXPERTS:
        tl.store(counts + expert, tl.sum(is_own_P, 0))


def launch_by_expert(topk_ids_P: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """See `experts.by_expert`, of at most SIZES[-1] pairs."""
    P, device = topk_ids_P.shape[0], topk_ids_P.device
    assert 0 < P <= SIZES[-1] and topk_ids_P.is_contiguous() and topk_ids_P.dtype == torch.int64
    order_P = torch.empty(P, dtype=torch.int64, device=device)
    counts_E = torch.empty(experts, dtype=torch.int32, device=device)
    by_expert_kernel[(experts + 1,)](
        topk_ids_P, order_P, counts_E, P, EXPERTS=experts, PADDED_PAIRS=next(size for size in SIZES if P <= size),
        num_warps=4 if P <= SIZES[0] else 8,
        **chained(device),
    )  # fmt: skip
    return order_P, counts_E


@triton.jit(do_not_specialize=["pairs"])
def count_pairs_kernel(
    topk_ids,  # [P] int64: from 0 to E
    counts,  # [B, PADDED_EXPERTS] int32
    pairs, EXPERTS: tl.constexpr, PADDED_EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    id_P = tl.load(topk_ids + p, mask=p < pairs, other=EXPERTS).to(tl.int32)
    count_E = tl.histogram(id_P, PADDED_EXPERTS, mask=id_P < EXPERTS)
    tl.store(counts + tl.program_id(0) * PADDED_EXPERTS + tl.arange(0, PADDED_EXPERTS), count_E)


@triton.jit(do_not_specialize=["pairs", "blocks", "tiles"])
def place_pairs_kernel(
    topk_ids,  # [P] int64: from 0 to E
    counts,  # [B, PADDED_EXPERTS] int32
    order,  # [P] int64, if not ALIGN
    totals,  # [E] int32, if not ALIGN
    places,  # [P] int32, if ALIGN
    table,  # [1 + R, 4] int32, if ALIGN: how many tiles there are; of each its expert, its first row and how many it has
    pairs, blocks, tiles,
    EXPERTS: tl.constexpr, PADDED_EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, ALIGN: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ALIGN: an expert's rows begin at a multiple of it; 0: they follow those of the expert before, and skipped pairs all."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    block, e = tl.program_id(0), tl.arange(0, PADDED_EXPERTS)
    total_E, before_E = tl.zeros([PADDED_EXPERTS], tl.int32), tl.zeros([PADDED_EXPERTS], tl.int32)
    for first in tl.range(0, blocks, 32):
        b = first + tl.arange(0, 32)
        count_BE = tl.load(counts + b[:, None] * PADDED_EXPERTS + e[None, :], mask=(b < blocks)[:, None], other=0)
        total_E += tl.sum(count_BE, 0)
        before_E += tl.sum(tl.where((b < block)[:, None], count_BE, 0), 0)
    rows_E = (total_E + ALIGN - 1) // ALIGN * ALIGN if ALIGN else total_E
    begin_E = tl.cumsum(rows_E, 0) - rows_E
    next_E = begin_E + before_E
    skipped = tl.sum(total_E, 0) + block * BLOCK - tl.sum(before_E, 0)  # the place of the next pair that is skipped
    for part in tl.range(0, BLOCK, PART):
        p = block * BLOCK + part + tl.arange(0, PART)
        id_P = tl.load(topk_ids + p, mask=p < pairs, other=EXPERTS).to(tl.int32)
        is_PE = ((id_P[:, None] == e[None, :]) & (e < EXPERTS)[None, :]).to(tl.int32)
        place_P = tl.sum(is_PE * (tl.cumsum(is_PE, 0) - 1 + next_E[None, :]), 1)
        next_E += tl.sum(is_PE, 0)
        is_skipped_P = (p < pairs) & (id_P >= EXPERTS)
        if ALIGN:
            tl.store(places + p, tl.where(is_skipped_P, -1, place_P), mask=p < pairs)
        else:
            ones_P = is_skipped_P.to(tl.int32)
            place_P = tl.where(is_skipped_P, skipped + tl.cumsum(ones_P, 0) - 1, place_P)
            skipped += tl.sum(ones_P, 0)
            tl.store(order + place_P, p.to(tl.int64), mask=p < pairs)
    if ALIGN:
        _tabulate(table, total_E, begin_E, block, blocks, tiles, TILE)
    elif block == 0:
        tl.store(totals + e, total_E, mask=e < EXPERTS)


@triton.jit
def _tabulate(table, total_E, begin_E, block, blocks, tiles, TILE: tl.constexpr):
    """Writes some tiles of the table: each program others."""
    e, tiles_E = tl.arange(0, total_E.shape[0]), (total_E + TILE - 1) // TILE
    end_E, number = tl.cumsum(tiles_E, 0), tl.sum(tiles_E, 0)
    if block == 0:
        tl.store(table, number)
    for first in tl.range(block * 32, tiles, blocks * 32):
        r = first + tl.arange(0, 32)
        expert_R = tl.sum((end_E[None, :] <= r[:, None]).to(tl.int32), 1)
        is_own_RE = e[None, :] == expert_R[:, None]
        done_R = (r - tl.sum(tl.where(is_own_RE, end_E - tiles_E, 0), 1)) * TILE  # rows of the expert in tiles before
        row_R = tl.sum(tl.where(is_own_RE, begin_E, 0), 1) + done_R
        left_R = tl.minimum(tl.sum(tl.where(is_own_RE, total_E, 0), 1) - done_R, TILE)
        at_R, ok_R = table + (1 + r) * 4, r < number
        tl.store(at_R, expert_R, mask=ok_R)
        tl.store(at_R + 1, row_R, mask=ok_R)
        tl.store(at_R + 2, left_R, mask=ok_R)


def launch_by_expert_many(topk_ids_P: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """See `experts.by_expert`, of any number of pairs."""
    order_P = torch.empty(topk_ids_P.shape[0], dtype=torch.int64, device=topk_ids_P.device)
    totals_E = torch.empty(experts, dtype=torch.int32, device=topk_ids_P.device)
    _launch_place(topk_ids_P, experts, (order_P, totals_E, totals_E, totals_E), 0, 0, 1)
    return order_P, totals_E


def launch_place_pairs(topk_ids_P: Tensor, experts: int, align: int, tile: int) -> tuple[Tensor, Tensor]:
    """See `experts.place_pairs`."""
    P, device = topk_ids_P.shape[0], topk_ids_P.device
    places_P = torch.empty(P, dtype=torch.int32, device=device)
    tiles = P // tile + min(P, experts)  # the most that P pairs can have
    table_R4 = torch.empty(1 + tiles, 4, dtype=torch.int32, device=device)
    _launch_place(topk_ids_P, experts, (topk_ids_P, places_P, places_P, table_R4), tiles, align, tile)
    return places_P, table_R4


def _launch_place(topk_ids_P: Tensor, experts: int, out: tuple[Tensor, ...], tiles: int, align: int, tile: int) -> None:
    """out: order, totals, places and table, of which each launch writes two."""
    P, device, padded = topk_ids_P.shape[0], topk_ids_P.device, triton.next_power_of_2(experts)
    assert P > 0 and topk_ids_P.is_contiguous() and topk_ids_P.dtype == torch.int64 and P + experts * align < 1 << 31
    blocks, part = triton.cdiv(P, BLOCK), max(16, min(128, MAX_ONES // padded))
    counts_BE = torch.empty(blocks, padded, dtype=torch.int32, device=device)
    sizes = {"EXPERTS": experts, "PADDED_EXPERTS": padded, "BLOCK": BLOCK}
    count_pairs_kernel[(blocks,)](topk_ids_P, counts_BE, P, **sizes, num_warps=4, **chained(device))
    place_pairs_kernel[(blocks,)](
        topk_ids_P,
        counts_BE,
        *out,
        P,
        blocks,
        tiles,
        **sizes,
        PART=part,
        ALIGN=align,
        TILE=tile,
        num_warps=8,
        **chained(device),
    )
