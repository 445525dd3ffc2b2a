"""The kernel of tables.py: a place of a program for each row of the pass.

Shapes: B rows of a batch, N rows of a block, E context rows of each with padding, T = B * N + B * E rows of the pass.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.attention.kernels.tables_triton import slots_of
from specdec.attention.pages import PageTable
from specdec.limits import DUMMY_PAGE
from specdec.ops.launch import chained


@triton.jit(
    do_not_specialize=["rows", "size", "emitted", "mask_id", "stride_tokens", "stride_row"],
    do_not_specialize_on_alignment=["page_table", "base_lens", "lens", "last"],
)
def block_tables_kernel(
    page_table,  # [B, pages] int32
    base_lens,  # [B] int32
    lens,  # [B] int32
    tokens,  # [B, E] int64
    last,  # [B] int64
    ids,  # [B, N] int64
    positions,  # [T] int64
    slots,  # [T] int64
    ends,  # [B] int32
    rows,  # B
    size,  # N
    emitted,  # E
    mask_id,
    stride_tokens,
    stride_row,
    DUMMY: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = t < rows * (size + emitted)
    is_block = t < rows * size
    c = tl.maximum(t - rows * size, 0)
    b = tl.where(ok, tl.where(is_block, t // size, c // emitted), 0)
    i = tl.where(is_block, t % size, c % emitted)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    length, last_place = tl.load(lens + b), tl.load(last + b).to(tl.int32)
    position = tl.where(is_block, length, tl.load(base_lens + b)) + i
    slot = slots_of(page_table + b.to(tl.int64) * stride_row, position, ok, PAGE_SIZE)
    is_kept = is_block | (i <= last_place)
    tl.store(positions + t, position.to(tl.int64), mask=ok)
    tl.store(slots + t, tl.where(is_kept, slot, DUMMY), mask=ok)
    is_anchor = is_block & ok & (i == 0)
    anchor = tl.load(tokens + b.to(tl.int64) * stride_tokens + last_place, mask=is_anchor, other=0)
    tl.store(ids + t, tl.where(is_anchor, anchor, mask_id.to(tl.int64)), mask=is_block & ok)
    tl.store(ends + b, length + size, mask=is_anchor)


def launch_block_tables(
    pages: PageTable, base_lens_B: Tensor, lens_B: Tensor, tokens_BE: Tensor, last_B: Tensor, size: int, mask_id: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`tables.block_tables`."""
    (B, E), device = tokens_BE.shape, lens_B.device
    assert pages.table.stride(1) == tokens_BE.stride(1) == 1 and last_B.is_contiguous()
    assert lens_B.is_contiguous() and base_lens_B.is_contiguous()
    T = B * (size + E)
    ids_BN = torch.empty(B, size, dtype=torch.int64, device=device)
    positions_T, slots_T = (torch.empty(T, dtype=torch.int64, device=device) for _ in range(2))
    ends_B = torch.empty(B, dtype=torch.int32, device=device)
    block_tables_kernel[(triton.cdiv(T, 128),)](
        pages.table, base_lens_B, lens_B, tokens_BE, last_B, ids_BN, positions_T, slots_T, ends_B,
        B, size, E, mask_id, tokens_BE.stride(0), pages.table.stride(0),
        DUMMY=DUMMY_PAGE * pages.page_size, PAGE_SIZE=pages.page_size, BLOCK=128, num_warps=4, **chained(device),
    )  # fmt: skip
    return ids_BN, positions_T, slots_T, ends_B
