"""The kernel of subtract.py: one program for each token and pair of query heads, computed in float32.

Order of chained launches (specdec/ops/launch.py): the kernel triggers early and reads only its layer's factor and norm weight,
which no kernel writes, before its wait.

Shapes: as in subtract.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.attention.differential.subtract import Difference
from specdec.ops.launch import chained


@triton.jit(do_not_specialize_on_alignment=["factor", "norm"])
def subtract_kernel(
    x,  # [T, I, 2, G, E]
    factor,  # float32, a scalar
    norm,  # [E] float32
    out,  # [T, I, G, E]
    scale,
    eps,
    HAS_WEIGHT: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)  # of T * I * G
    first = (pair // GROUP) * (2 * GROUP) + pair % GROUP
    e = tl.arange(0, PADDED)
    ok = e < SIZE
    weight = tl.load(factor)
    if HAS_WEIGHT:
        norm_E = tl.load(norm + e, mask=ok, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    a = tl.load(x + first * SIZE + e, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(x + (first + GROUP) * SIZE + e, mask=ok, other=0.0).to(tl.float32)
    value = a - weight * b
    value = value * tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps) * scale
    if HAS_WEIGHT:
        value *= norm_E
    tl.store(out + pair * SIZE + e, value.to(out.dtype.element_ty), mask=ok)


def launch_subtract(out_THE: Tensor, num_kv_heads: int, difference: Difference) -> Tensor:
    """`subtract_halves` in one launch."""
    T, H, E = out_THE.shape
    assert H % num_kv_heads == 0 and num_kv_heads % 2 == 0 and difference.factor.dtype == torch.float32
    norm_E = difference.weight_E
    assert norm_E is None or (norm_E.shape == (E,) and norm_E.dtype == torch.float32 and norm_E.is_contiguous())
    norm = difference.factor if norm_E is None else norm_E  # not read without a weight
    x_THE = out_THE.contiguous()
    out = x_THE.new_empty(T, H // 2, E)
    if T:
        subtract_kernel[(T * (H // 2),)](
            x_THE, difference.factor, norm, out, difference.scale, difference.eps,
            HAS_WEIGHT=norm_E is not None, GROUP=H // num_kv_heads, SIZE=E, PADDED=triton.next_power_of_2(E), num_warps=1,
            **chained(out.device),
        )  # fmt: skip
    return out
