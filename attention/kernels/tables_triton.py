"""Kernels that fill tables: positions and slots of each sequence's next tokens, and the first keys that queries read.

The kernels know pages and positions, not which tokens stand there.  `slots_of` is for kernels elsewhere that fill tables, and
`slots_on` for kernels elsewhere that read rows of a cache.

Shapes: B sequences, P tokens of each, W table width, R rows, T queries, N keys of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.attention.kinds import LayerKind
from specdec.attention.pages import PageTable
from specdec.ops.launch import chained

EVERY = 1 << 30  # a window of all keys


@triton.jit
def slots_on(page_N, position_N, PAGE_SIZE: tl.constexpr):
    """int64 slots of positions on these pages, for the addresses of rows.

    Triton 3.6 takes the sum for multiples of PAGE_SIZE, which only the first position of each page is.  Where rows are not
    aligned by themselves, it would then load pieces that are too wide for them.  The hint takes that back; what the compiler
    knows of a row's stride remains.
    """
    return tl.multiple_of(page_N.to(tl.int64) * PAGE_SIZE + position_N % PAGE_SIZE, 1)


@triton.jit
def slots_of(pages, position, ok, PAGE_SIZE: tl.constexpr):
    """int64 slots of positions.  pages: a pointer for each position, to the start of its sequence's table row."""
    page = tl.load(pages + position // PAGE_SIZE, mask=ok, other=0)
    return page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE


@triton.jit(do_not_specialize=["rows", "count", "stride_row"], do_not_specialize_on_alignment=["page_table", "lens"])
def next_tokens_kernel(
    page_table,  # [B, W] int32
    lens,  # [B] int32
    positions,  # [B, P] or [P, B] int64
    slots,  # likewise
    ends,  # [P, B] int32
    rows,  # B
    count,  # P
    stride_row,
    PAGE_SIZE: tl.constexpr,
    BY_STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = t < rows * count
    b, p = t // count, t % count
    to = t
    if BY_STEP:
        to = p * rows + b
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    position = tl.load(lens + b, mask=ok, other=0) + p
    tl.store(positions + to, position.to(tl.int64), mask=ok)
    tl.store(slots + to, slots_of(page_table + b.to(tl.int64) * stride_row, position, ok, PAGE_SIZE), mask=ok)
    tl.store(ends + p * rows + b, position + 1, mask=ok)


def launch_next_tokens(pages: PageTable, lens_B: Tensor, count: int, by_step: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`PageTable.next_tokens`: (positions, slots, ends_PB).  lens_B is int32."""
    B = lens_B.shape[0]
    assert pages.table.stride(1) == 1 and lens_B.is_contiguous()
    shape = (count, B) if by_step else (B, count)
    positions, slots = (torch.empty(shape, dtype=torch.int64, device=lens_B.device) for _ in range(2))
    ends_PB = torch.empty(count, B, dtype=torch.int32, device=lens_B.device)
    if B * count:
        next_tokens_kernel[(triton.cdiv(B * count, 128),)](
            pages.table, lens_B, positions, slots, ends_PB, B, count, pages.table.stride(0),
            PAGE_SIZE=pages.page_size, BY_STEP=by_step, BLOCK=128, num_warps=1, **chained(lens_B.device),
        )  # fmt: skip
    return positions, slots, ends_PB


@triton.jit(do_not_specialize=["total", "per_row"], do_not_specialize_on_alignment=["lens"])
def last_positions_kernel(
    lens,  # [R] int32
    positions,  # [T] int64
    total,  # T
    per_row,  # T / R
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = t < total
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    position = tl.load(lens + t // per_row, mask=ok, other=0) - per_row + t % per_row
    tl.store(positions + t, position.to(tl.int64), mask=ok)


def launch_last_positions(lens_R: Tensor, per_row: int) -> Tensor:
    """`segment.last_positions` of rows with `per_row` queries each: [R * per_row] int64."""
    T = lens_R.shape[0] * per_row
    assert lens_R.is_contiguous()
    positions_T = torch.empty(T, dtype=torch.int64, device=lens_R.device)
    if T:
        last_positions_kernel[(triton.cdiv(T, 128),)](
            lens_R, positions_T, T, per_row, BLOCK=128, num_warps=1, **chained(lens_R.device)
        )  # fmt: skip
    return positions_T


@triton.jit(
    do_not_specialize=["total", "per_base", "span", "skip"],
    do_not_specialize_on_alignment=["positions", "base", "lower"],
)
def first_keys_kernel(
    positions,  # [T] int64
    base,  # [B] int32
    lower,  # [T] int32
    first_keys,  # [T] int32
    total,  # T
    per_base,  # T / B
    span,  # the window or the chunk; of queries that read all keys but the first ones, more than any position
    skip,  # the first keys, which no query reads
    CHUNKS: tl.constexpr,
    HAS_BASE: tl.constexpr,
    HAS_LOWER: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = t < total
    # No gdc_launch_dependents: the next kernel must start only when this one is complete, because the next kernel may be
    # attention, which reads first keys before its own wait (specdec/ops/launch.py).
    if PDL:
        tl.extra.cuda.gdc_wait()
    position = tl.load(positions + t, mask=ok, other=0).to(tl.int32)
    if CHUNKS:
        first = position - position % span
    else:
        first = tl.maximum(position - (span - 1), skip)
    if HAS_BASE:
        first = tl.maximum(first - tl.load(base + t // per_base, mask=ok, other=0), 0)
    if HAS_LOWER:
        first = tl.maximum(first, tl.load(lower + t, mask=ok, other=0))
    tl.store(first_keys + t, first, mask=ok)


def launch_first_keys(kind: LayerKind, positions_T: Tensor, base_B: Tensor | None, lower_T: Tensor | None) -> Tensor:
    """`segment.first_keys`.

    The two are equal where positions are not negative; queries at negative positions read no key.
    """
    T, device = positions_T.shape[0], positions_T.device
    assert all(x is None or x.is_contiguous() for x in (positions_T, base_B, lower_T)) and not kind.reads_all
    first_T = torch.empty(T, dtype=torch.int32, device=device)
    if T:
        first_keys_kernel[(triton.cdiv(T, 128),)](
            positions_T, first_T if base_B is None else base_B, first_T if lower_T is None else lower_T, first_T,
            T, T if base_B is None else T // base_B.shape[0], kind.span or EVERY, kind.skip,
            CHUNKS=kind.chunk is not None, HAS_BASE=base_B is not None, HAS_LOWER=lower_T is not None,
            BLOCK=128, num_warps=1, **chained(device),
        )  # fmt: skip
    return first_T
