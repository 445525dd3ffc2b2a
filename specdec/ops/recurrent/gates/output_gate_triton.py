"""The kernel of output_gate.py: one program for each row and block of its values.

Shapes: T tokens, R rows asked for, Q heads, D head dimension, F = Q * D.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained

BLOCK = 1024


@triton.jit(do_not_specialize=["stride_out", "stride_gate"])
def output_gate_kernel(
    out,  # [R, F]
    gate,  # [T, F]
    rows,  # [R] int64, if SELECTS
    gated,  # [R, F]
    stride_out,
    stride_gate,
    SELECTS: tl.constexpr,
    SILU: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = f < SIZE
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    source = tl.load(rows + row) if SELECTS else row
    opened = tl.load(gate + source * stride_gate + f, mask=ok, other=0.0)
    wide = opened.to(tl.float32)
    opened = (wide * tl.sigmoid(wide) if SILU else tl.sigmoid(wide)).to(opened.dtype)
    value = tl.load(out + row * stride_out + f, mask=ok, other=0.0).to(tl.float32) * opened.to(tl.float32)
    tl.store(gated + row * SIZE + f, value.to(gated.dtype.element_ty), mask=ok)


def launch_gated_output(out_RQD: Tensor, gate_TQD: Tensor, rows_R: Tensor | None = None, silu: bool = False) -> Tensor:
    """`output_gate.gated_output`: [R, Q * D]."""
    R, Q, D = out_RQD.shape
    assert gate_TQD.shape[1:] == (Q, D) and gate_TQD.dtype == out_RQD.dtype and (rows_R is not None or len(gate_TQD) == R)
    assert out_RQD.stride()[1:] == gate_TQD.stride()[1:] == (D, 1)
    gated = out_RQD.new_empty(R, Q * D)
    if R:
        block = min(BLOCK, triton.next_power_of_2(Q * D))
        output_gate_kernel[(R, triton.cdiv(Q * D, block))](
            out_RQD, gate_TQD, gate_TQD if rows_R is None else rows_R.contiguous(), gated, out_RQD.stride(0),
            gate_TQD.stride(0), SELECTS=rows_R is not None, SILU=silu, SIZE=Q * D, BLOCK=block, num_warps=4,
            **chained(out_RQD.device),
        )  # fmt: skip
    return gated
