"""The kernels of convolve.py: one program for each row and block of columns, and with the norm after it one for each row.

Shapes: R rows of blocks of B each, H hidden, T taps, G groups, X = 2 * T * G, C rows below.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.products.partials import Partials

BLOCK = 1024


@triton.jit
def _sum_of(x, stride_partial, h, ok, PARTIALS: tl.constexpr):
    """A row, or the sum of its partials."""
    value = tl.load(x + h, mask=ok, other=0.0)
    for s in tl.static_range(1, PARTIALS):
        value += tl.load(x + s * stride_partial + h, mask=ok, other=0.0)
    return value


@triton.jit(do_not_specialize=["rows"])
def convolve_kernel(
    x,  # [R, H]
    own,  # [R, X]
    base,  # [2, T, H]
    below,  # [C, H]
    out,  # [R + C, H]
    rows,  # R
    stride_x,
    stride_below,
    BLOCK_ROWS: tl.constexpr,  # B
    SIDE: tl.constexpr,
    TAPS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = h < SIZE
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if row >= rows:
        tl.store(out + row * SIZE + h, tl.load(below + (row - rows) * stride_below + h, mask=ok), mask=ok)
        return
    slot = row % BLOCK_ROWS
    own += row * (2 * TAPS * (SIZE // GROUP)) + SIDE * TAPS * (SIZE // GROUP) + h // GROUP
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        kernel = tl.load(base + (SIDE * TAPS + tap) * SIZE + h, mask=ok, other=0.0).to(tl.float32)
        kernel += tl.load(own + tap * (SIZE // GROUP), mask=ok, other=0.0).to(tl.float32)
        value = tl.load(x + (row - tap) * stride_x + h, mask=ok & (slot >= tap), other=0.0).to(tl.float32)
        total += kernel * value
    tl.store(out + row * SIZE + h, total.to(out.dtype.element_ty), mask=ok)


@triton.jit
def convolve_add_norm_kernel(
    x,  # [R, H]
    delta,  # [R, H], or [PARTIALS, R, H] float32, whose sum is rounded first
    own,  # [R, X]
    base,  # [2, T, H]
    weight,
    total,  # [R, H]
    normed,  # [R, H]
    stride_x,
    stride_delta,
    stride_partial,
    eps,
    BLOCK_ROWS: tl.constexpr,  # B
    TAPS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    PARTIALS: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, PADDED)
    ok = h < SIZE
    scale = tl.load(weight + h, mask=ok, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = row % BLOCK_ROWS
    own += row * (2 * TAPS * (SIZE // GROUP)) + TAPS * (SIZE // GROUP) + h // GROUP
    value = tl.load(x + row * stride_x + h, mask=ok, other=0.0)
    added = tl.zeros([PADDED], tl.float32)
    for tap in tl.static_range(TAPS):
        kernel = tl.load(base + (TAPS + tap) * SIZE + h, mask=ok, other=0.0).to(tl.float32)
        kernel += tl.load(own + tap * (SIZE // GROUP), mask=ok, other=0.0).to(tl.float32)
        product = _sum_of(delta + (row - tap) * stride_delta, stride_partial, h, ok & (slot >= tap), PARTIALS)
        added += kernel * product.to(value.dtype).to(tl.float32)
    value = (value.to(tl.float32) + added.to(value.dtype).to(tl.float32)).to(value.dtype)
    tl.store(total + row * SIZE + h, value, mask=ok)
    value = value.to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps) * scale
    tl.store(normed + row * SIZE + h, value.to(normed.dtype.element_ty), mask=ok)


def launch_convolve(
    x_RH: Tensor, own_RX: Tensor, base_2TH: Tensor, side: int, size: int, below_CH: Tensor | None = None
) -> Tensor:  # fmt: skip
    """`convolve.convolve`."""
    (R, H), C = x_RH.shape, 0 if below_CH is None else len(below_CH)
    taps, group = _check(x_RH, own_RX, base_2TH, size)
    below = x_RH if below_CH is None else below_CH
    assert below.shape[1] == H and below.stride(1) == 1 and below.dtype == x_RH.dtype
    out = x_RH.new_empty(R + C, H)
    if R + C:
        convolve_kernel[(R + C, triton.cdiv(H, BLOCK))](
            x_RH, own_RX, base_2TH, below, out, R, x_RH.stride(0), below.stride(0), BLOCK_ROWS=size, SIDE=side, TAPS=taps,
            GROUP=group, SIZE=H, BLOCK=BLOCK, num_warps=4, **chained(x_RH.device),
        )  # fmt: skip
    return out


def launch_convolve_add_norm(
    x_RH: Tensor, delta: Tensor | Partials, own_RX: Tensor, base_2TH: Tensor, size: int, weight_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`convolve.convolve_add_norm`."""
    (R, H), sums_SRH = x_RH.shape, delta.sums_SMN if isinstance(delta, Partials) else delta[None]
    taps, group = _check(x_RH, own_RX, base_2TH, size)
    assert delta.dtype == x_RH.dtype and sums_SRH.shape[1:] == x_RH.shape and sums_SRH.stride(2) == 1
    assert weight_H.shape == (H,) and weight_H.is_contiguous()
    total, normed = torch.empty_like(x_RH), torch.empty_like(x_RH)
    if R:
        convolve_add_norm_kernel[(R,)](
            x_RH, sums_SRH, own_RX, base_2TH, weight_H, total, normed, x_RH.stride(0), sums_SRH.stride(1), sums_SRH.stride(0),
            eps, BLOCK_ROWS=size, TAPS=taps, GROUP=group, SIZE=H, PADDED=triton.next_power_of_2(H), PARTIALS=len(sums_SRH),
            num_warps=max(1, min(16, triton.next_power_of_2(H) // 256)), **chained(x_RH.device),
        )  # fmt: skip
    return total, normed


def _check(x_RH: Tensor, own_RX: Tensor, base_2TH: Tensor, size: int) -> tuple[int, int]:
    """(taps, columns of a group)."""
    (R, H), taps = x_RH.shape, base_2TH.shape[1]
    groups = own_RX.shape[1] // (2 * taps)
    assert base_2TH.shape == (2, taps, H) and own_RX.shape == (R, 2 * taps * groups) and H % groups == 0 and R % size == 0
    assert x_RH.is_contiguous() and own_RX.is_contiguous() and base_2TH.is_contiguous()
    assert own_RX.dtype == base_2TH.dtype == x_RH.dtype
    return taps, H // groups
