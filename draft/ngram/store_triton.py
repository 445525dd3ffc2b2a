"""The kernel of store.py: one program for each sequence, which writes what a round has emitted after its text.

Shapes: B sequences, E tokens of each, N slots.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec.attention.kernels.tables_triton import slots_of
from specdec.attention.pages import PageTable
from specdec.ops.launch import chained


@triton.jit(
    do_not_specialize=["stride_row", "emitted", "stride_tokens"],
    do_not_specialize_on_alignment=["page_table", "lens"],
)
def write_text_kernel(
    page_table,  # [B, W] int32
    lens,  # [B] int32
    tokens,  # [B, E] int64
    text,  # [N] int32, written
    stride_row,
    emitted,  # E
    stride_tokens,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    b, e_E = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    ok_E = e_E < emitted
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token_E = tl.load(tokens + b * stride_tokens + e_E, mask=ok_E, other=0)
    slot_E = slots_of(page_table + b * stride_row, tl.load(lens + b) + e_E, ok_E, PAGE_SIZE)
    tl.store(text + slot_E, token_E.to(tl.int32), mask=ok_E)


def launch_write(pages: PageTable, lens_B: Tensor, tokens_BE: Tensor, text_N: Tensor) -> None:
    """`store.TokenStore.append`."""
    (B, E), table = tokens_BE.shape, pages.table
    assert table.stride(1) == 1 and tokens_BE.stride(1) == 1 and lens_B.is_contiguous() and lens_B.shape[0] == B
    write_text_kernel[(B,)](
        table, lens_B, tokens_BE, text_N, table.stride(0), E, tokens_BE.stride(0),
        PAGE_SIZE=pages.page_size, BLOCK=max(16, triton.next_power_of_2(E)), num_warps=1, **chained(text_N.device),
    )  # fmt: skip
