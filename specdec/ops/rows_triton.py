"""The kernels of rows.py: one program for each picked row and block of columns, or for each block of ids.

Shapes: B sequences, N rows of a sequence, E picked rows, F columns, S ids, T rows of K columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained


@triton.jit(do_not_specialize=["places", "stride_index"])
def take_rows_kernel(
    x,  # [B, N, F]
    index,  # [B, E] int64, or [B, 1] if RUN
    out,  # [B, E, F]
    places,  # E
    stride_index,
    stride_b,
    stride_n,
    RUN: tl.constexpr,  # whether a sequence's rows follow one another
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
    if RUN:
        n = tl.load(index + b * stride_index) + e
    else:
        n = tl.load(index + b * stride_index + e)
    tl.store(out + row * SIZE + f, tl.load(x + b * stride_b + n * stride_n + f, mask=f < SIZE), mask=f < SIZE)


def launch_take_rows(x_BNF: Tensor, index_BE: Tensor, out: Tensor | None, run: int = 0) -> Tensor:
    """`rows.take_rows`: [B, E, F].  run: if given, E of `rows.take_run`; index_BE has one column."""
    B, E, F = index_BE.shape[0], run or index_BE.shape[1], x_BNF.shape[2]
    if out is None:
        out = x_BNF.new_empty(B, E, F)
    assert out.shape == (B, E, F) and out.is_contiguous() and out.dtype == x_BNF.dtype
    assert x_BNF.stride(2) == 1 and index_BE.stride(1) == 1 and (index_BE.shape[1] == 1 or not run)
    if out.numel():
        take_rows_kernel[(B * E, triton.cdiv(F, 2048))](
            x_BNF, index_BE, out, E, index_BE.stride(0), *x_BNF.stride()[:2],
            RUN=run > 0, SIZE=F, BLOCK=min(2048, triton.next_power_of_2(F)), num_warps=4, **chained(x_BNF.device),
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["stride_t"])
def take_columns_kernel(
    x,  # [T, K]
    order,  # [F] int32, a weight
    out,  # [T, F]
    stride_t,
    SIZE: tl.constexpr,  # F
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    from_F = tl.load(order + f, mask=f < SIZE, other=0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tl.store(out + t * SIZE + f, tl.load(x + t * stride_t + from_F, mask=f < SIZE), mask=f < SIZE)


def launch_take_columns(x: Tensor, order_F: Tensor) -> Tensor:
    """`rows.take_columns`: [..., F]."""
    x_TK, F = x.reshape(-1, x.shape[-1]), order_F.shape[0]
    assert x_TK.stride(1) == 1 and order_F.is_contiguous() and order_F.dtype == torch.int32
    out = x.new_empty(*x.shape[:-1], F)
    if out.numel():
        take_columns_kernel[(x_TK.shape[0], triton.cdiv(F, 1024))](
            x_TK, order_F, out, x_TK.stride(0), SIZE=F, BLOCK=min(1024, triton.next_power_of_2(F)), num_warps=4,
            **chained(x.device),
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["total", "columns", "stride_ids"])
def prepend_kernel(
    first,  # [B] int64
    ids,  # [B, S] int64
    out,  # [B, 1 + S] int64
    total,  # B * (1 + S)
    columns,  # 1 + S
    stride_ids,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b, c = t // columns, t % columns
    ok = t < total
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    front = tl.load(first + b, mask=ok & (c == 0), other=0)
    others = tl.load(ids + b.to(tl.int64) * stride_ids + c - 1, mask=ok & (c > 0), other=0)
    tl.store(out + t, tl.where(c == 0, front, others), mask=ok)


def launch_prepend(first_B: Tensor, ids_BS: Tensor) -> Tensor:
    """`rows.prepend`: [B, 1 + S] int64."""
    B, S = ids_BS.shape
    out = torch.empty(B, 1 + S, dtype=torch.int64, device=ids_BS.device)
    assert first_B.shape == (B,) and first_B.is_contiguous() and (S < 2 or ids_BS.stride(1) == 1)
    assert first_B.dtype == ids_BS.dtype == torch.int64
    if B:
        prepend_kernel[(triton.cdiv(out.numel(), 128),)](
            first_B, ids_BS, out, out.numel(), 1 + S, ids_BS.stride(0), BLOCK=128, num_warps=1, **chained(ids_BS.device)
        )
    return out
