"""The kernel of gated_norm.py: a program norms some heads of a token.

Shapes: as of gated_norm.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained

NUMBERS = 2048  # of a program


@triton.jit
def gated_norm_kernel(
    x, z, weight,  # [T, H, V] twice, [V]
    out,  # [T, H, V]
    stride_x, stride_z, eps,
    H: tl.constexpr, V: tl.constexpr, BLOCK_H: tl.constexpr, PADDED_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    t, h, v = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, PADDED_V)
    ok_HV, at_HV = (h < H)[:, None] & (v < V)[None, :], h[:, None] * V + v[None, :]
    scale_V = tl.load(weight + v, mask=v < V, other=0.0)  # no kernel writes weights, so they may be read before the wait
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x_HV = tl.load(x + t * stride_x + at_HV, mask=ok_HV, other=0.0)
    z_HV = tl.load(z + t * stride_z + at_HV, mask=ok_HV, other=0.0).to(tl.float32)
    wide_HV = x_HV.to(tl.float32)
    inverse_H = tl.rsqrt(tl.sum(wide_HV * wide_HV, 1) / V + eps)
    normed_HV = (wide_HV * inverse_H[:, None]).to(x_HV.dtype).to(tl.float32)
    scaled_HV = (normed_HV * scale_V.to(tl.float32)[None, :]).to(x_HV.dtype).to(tl.float32)
    gated_HV = scaled_HV * (z_HV * tl.sigmoid(z_HV))
    tl.store(out + t * H * V + at_HV, gated_HV.to(x_HV.dtype), mask=ok_HV)


def launch_gated_norm(x_THV: Tensor, z_THV: Tensor, weight_V: Tensor, eps: float) -> Tensor:
    """`gated_norm.gated_norm`: [T, H, V]."""
    T, H, V = x_THV.shape
    assert z_THV.shape == x_THV.shape and weight_V.shape == (V,) and weight_V.is_contiguous()
    assert x_THV.dtype == z_THV.dtype == weight_V.dtype and all(each.stride()[1:] == (V, 1) for each in (x_THV, z_THV))
    out_THV, padded = x_THV.new_empty(T, H, V), triton.next_power_of_2(V)
    block = min(triton.next_power_of_2(H), max(1, NUMBERS // padded))
    if T:
        gated_norm_kernel[(triton.cdiv(H, block), T)](
            x_THV, z_THV, weight_V, out_THV, x_THV.stride(0), z_THV.stride(0), eps, H=H, V=V, BLOCK_H=block,
            PADDED_V=padded, num_warps=4, **chained(x_THV.device),
        )  # fmt: skip
    return out_THV
