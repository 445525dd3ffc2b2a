"""The kernel of gated_norm.py: a program norms some heads of a token.

Shapes: as of gated_norm.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.recurrent.gates.gated_norm import DELTA, NormForm

NUMBERS = 2048  # of a program, if a head has no more


@triton.jit
def gated_norm_kernel(
    x, z, weight,  # [T, H, V] twice, [V] or [H, V]
    out,  # [T, H, V]
    stride_x, stride_z, eps,
    H: tl.constexpr, V: tl.constexpr, EACH: tl.constexpr, SIGMOID: tl.constexpr, GATE_FIRST: tl.constexpr,
    ROUNDED: tl.constexpr, BLOCK_H: tl.constexpr, PADDED_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """EACH: whether every head has weights of its own."""
    t, h, v = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, PADDED_V)
    ok_HV, at_HV = (h < H)[:, None] & (v < V)[None, :], h[:, None] * V + v[None, :]
    # No kernel writes weights, so they may be read before the wait.
    if EACH:
        scale_HV = tl.load(weight + at_HV, mask=ok_HV, other=0.0).to(tl.float32)
    else:
        scale_HV = tl.load(weight + v, mask=v < V, other=0.0).to(tl.float32)[None, :]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x_HV = tl.load(x + t * stride_x + at_HV, mask=ok_HV, other=0.0)
    z_HV = tl.load(z + t * stride_z + at_HV, mask=ok_HV, other=0.0).to(tl.float32)
    gate_HV = tl.sigmoid(z_HV) if SIGMOID else z_HV * tl.sigmoid(z_HV)
    wide_HV = x_HV.to(tl.float32)
    if GATE_FIRST:
        wide_HV *= gate_HV
    wide_HV *= tl.rsqrt(tl.sum(wide_HV * wide_HV, 1) / V + eps)[:, None]
    if ROUNDED:
        wide_HV = wide_HV.to(x_HV.dtype).to(tl.float32)
    wide_HV *= scale_HV
    if ROUNDED:
        wide_HV = wide_HV.to(x_HV.dtype).to(tl.float32)
    if not GATE_FIRST:
        wide_HV *= gate_HV
    tl.store(out + t * H * V + at_HV, wide_HV.to(x_HV.dtype), mask=ok_HV)


def launch_gated_norm(x_THV: Tensor, z_THV: Tensor, weight: Tensor, eps: float, form: NormForm = DELTA) -> Tensor:
    """`gated_norm.gated_norm`: [T, H, V]."""
    T, H, V = x_THV.shape
    assert z_THV.shape == x_THV.shape and weight.shape in ((V,), (H, V)) and weight.is_contiguous()
    assert x_THV.dtype == z_THV.dtype == weight.dtype and all(each.stride()[1:] == (V, 1) for each in (x_THV, z_THV))
    out_THV, padded = x_THV.new_empty(T, H, V), triton.next_power_of_2(V)
    block = min(triton.next_power_of_2(H), max(1, NUMBERS // padded))
    if T:
        gated_norm_kernel[(triton.cdiv(H, block), T)](
            x_THV, z_THV, weight, out_THV, x_THV.stride(0), z_THV.stride(0), eps, H=H, V=V, EACH=weight.dim() == 2,
            SIGMOID=form.sigmoid, GATE_FIRST=form.gate_first, ROUNDED=form.rounded, BLOCK_H=block, PADDED_V=padded,
            num_warps=4 if padded <= NUMBERS else 8, **chained(x_THV.device),
        )  # fmt: skip
    return out_THV
