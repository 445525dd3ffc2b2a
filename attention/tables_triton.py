"""Kernels that fill tables: where the next tokens of each sequence stand.  Knows pages and positions, not who the tokens are.

`slots_of` is for kernels that fill tables of their own.

Shapes: B sequences, P tokens of each, W table width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained


@triton.jit
def slots_of(pages, position, ok, PAGE_SIZE: tl.constexpr):
    """int64 slots of positions; pages: pointers to the table row of each."""
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


def launch_next_tokens(
    page_table_BW: Tensor, lens_B: Tensor, count: int, page_size: int, by_step: bool
) -> tuple[Tensor, Tensor, Tensor]:
    B = lens_B.shape[0]
    assert page_table_BW.stride(1) == 1 and lens_B.is_contiguous()
    shape = (count, B) if by_step else (B, count)
    positions, slots = (torch.empty(shape, dtype=torch.int64, device=lens_B.device) for _ in range(2))
    ends_PB = torch.empty(count, B, dtype=torch.int32, device=lens_B.device)
    if B * count:
        next_tokens_kernel[(triton.cdiv(B * count, 128),)](
            page_table_BW, lens_B, positions, slots, ends_PB, B, count, page_table_BW.stride(0),
            PAGE_SIZE=page_size, BY_STEP=by_step, BLOCK=128, num_warps=1, **chained(lens_B.device),
        )  # fmt: skip
    return positions, slots, ends_PB
