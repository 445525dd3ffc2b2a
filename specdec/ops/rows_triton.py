"""The kernel of rows.py: one program for each picked row and block of columns.

Shapes: B sequences, N rows of a sequence, E picked rows, F columns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained


@triton.jit(do_not_specialize=["places", "stride_index"])
def take_rows_kernel(
    x,  # [B, N, F]
    index,  # [B, E] int64
    out,  # [B, E, F]
    places,  # E
    stride_index,
    stride_b,
    stride_n,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    b, e = row // places, row % places
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    n = tl.load(index + b * stride_index + e)
    tl.store(out + row * SIZE + f, tl.load(x + b * stride_b + n * stride_n + f, mask=f < SIZE), mask=f < SIZE)


def launch_take_rows(x_BNF: Tensor, index_BE: Tensor, out: Tensor | None) -> Tensor:
    """`rows.take_rows`: [B, E, F]."""
    (B, E), F = index_BE.shape, x_BNF.shape[2]
    if out is None:
        out = x_BNF.new_empty(B, E, F)
    assert out.shape == (B, E, F) and out.is_contiguous() and out.dtype == x_BNF.dtype
    assert x_BNF.stride(2) == 1 and index_BE.stride(1) == 1
    if out.numel():
        take_rows_kernel[(B * E, triton.cdiv(F, 2048))](
            x_BNF, index_BE, out, E, index_BE.stride(0), *x_BNF.stride()[:2],
            SIZE=F, BLOCK=min(2048, triton.next_power_of_2(F)), num_warps=4, **chained(x_BNF.device),
        )  # fmt: skip
    return out
