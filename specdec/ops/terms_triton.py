"""The kernel of terms.py: one program for each row, which reads every rank's term of it once.

Shapes: N ranks, T tokens, H hidden size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained


@triton.jit
def add_terms_kernel(
    x, terms, weight, total, normed, stride_x, stride_term, eps,
    TERMS: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, HAS_X: tl.constexpr, HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, PADDED)
    ok = h < SIZE
    scale = tl.zeros([PADDED], tl.float32)
    if HAS_NORM:  # no kernel writes weights, so they may be read before the wait
        scale = tl.load(weight + h, mask=ok, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    term = terms + row * SIZE + h
    value = tl.load(term, mask=ok, other=0.0).to(tl.float32)
    for _ in tl.static_range(TERMS - 1):
        term += stride_term
        value += tl.load(term, mask=ok, other=0.0).to(tl.float32)
    if HAS_X:
        value = tl.load(x + row * stride_x + h, mask=ok, other=0.0).to(tl.float32) + value
    rounded = value.to(total.dtype.element_ty)
    tl.store(total + row * SIZE + h, rounded, mask=ok)
    if HAS_NORM:
        value = rounded.to(tl.float32)
        value = value * tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps) * scale
        tl.store(normed + row * SIZE + h, value.to(normed.dtype.element_ty), mask=ok)


def launch_add_terms(x_TH: Tensor | None, terms_NTH: Tensor) -> Tensor:
    """`terms.add_terms`.  The rows of x may be strided."""
    return _launch(x_TH, terms_NTH, None, 0.0)[0]


def launch_add_terms_rms_norm(x_TH: Tensor, terms_NTH: Tensor, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`terms.add_terms_rms_norm`.  The rows of x may be strided."""
    return _launch(x_TH, terms_NTH, weight_H, eps)


def _launch(x: Tensor | None, terms: Tensor, weight_H: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    N, *shape = terms.shape
    H = shape[-1] if len(shape) > 1 else 1
    total = terms.new_empty(shape)
    normed = total if weight_H is None else torch.empty_like(total)
    rows = total.numel() // H
    x_TH = total.view(rows, H) if x is None else x.reshape(rows, H)
    x_TH = x_TH if x_TH.stride(1) == 1 else x_TH.contiguous()
    assert terms.is_contiguous() and x_TH.dtype == terms.dtype and (weight_H is None or weight_H.shape == (H,))
    if rows:
        add_terms_kernel[(rows,)](
            x_TH, terms, total if weight_H is None else weight_H, total, normed, x_TH.stride(0), rows * H, eps,
            TERMS=N, SIZE=H, PADDED=triton.next_power_of_2(H), HAS_X=x is not None, HAS_NORM=weight_H is not None,
            num_warps=max(1, min(16, triton.next_power_of_2(H) // 256)), **chained(terms.device),
        )  # fmt: skip
    return total, normed
