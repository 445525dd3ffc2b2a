"""The kernel of `with_sinks`: it scales each head's output by the share that the sink leaves to the keys.

The kernel knows no keys.  Shapes: T queries, H heads, D value dim.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec.attention.state import AttentionState
from specdec.ops.launch import chained


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["out", "lse", "sinks", "new_lse"])
def sinks_kernel(
    out,  # [T, H, D], any float type: changed in place
    lse,  # [T, H] float32, natural log
    sinks,  # [H], any float type
    new_lse,  # [T, H] float32
    rows,  # T * H
    stride_out_t,
    stride_out_h,
    stride_lse_t,
    stride_lse_h,
    HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    ok = row < rows
    d = tl.arange(0, PADDED_DIM)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    sink = tl.load(sinks + head, mask=ok, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    keys = tl.load(lse + token * stride_lse_t + head * stride_lse_h, mask=ok, other=-float("inf"))
    top = tl.maximum(keys, sink)
    top = tl.where(top == -float("inf"), 0.0, top)
    weight = tl.exp(keys - top)
    total = weight + tl.exp(sink - top)
    share = tl.where(weight > 0, weight / total, 0.0)
    at = out + (token * stride_out_t + head * stride_out_h)[:, None] + d[None, :]
    ok_out = ok[:, None] & (d < VALUE_DIM)[None, :]
    x = tl.load(at, mask=ok_out, other=0.0)
    tl.store(at, (x.to(tl.float32) * share[:, None]).to(x.dtype), mask=ok_out)
    tl.store(new_lse + row, tl.where(total > 0, top + tl.log(tl.where(total > 0, total, 1.0)), -float("inf")), mask=ok)


def launch_sinks(state: AttentionState, sinks_H: Tensor) -> AttentionState:
    """`with_sinks`, which changes the state's output in place."""
    out_THD, lse_TH = state
    T, H, D = out_THD.shape
    assert out_THD.stride(2) == 1 and sinks_H.is_contiguous()
    new_lse_TH = lse_TH.new_empty(T, H)
    block = 4
    if T:
        sinks_kernel[(triton.cdiv(T * H, block),)](
            out_THD, lse_TH, sinks_H, new_lse_TH, T * H, *out_THD.stride()[:2], *lse_TH.stride(),
            HEADS=H, VALUE_DIM=D, PADDED_DIM=triton.next_power_of_2(D), BLOCK=block, num_warps=1, **chained(out_THD.device),
        )  # fmt: skip
    return AttentionState(out_THD, new_lse_TH)
