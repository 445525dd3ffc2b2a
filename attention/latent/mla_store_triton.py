"""The kernel between projection and latent attention: the latent's norm, rotary positions, and the latent into its slot.

`store_latent` in mla.py defines what it computes, and caches/fp8_latent.py the bytes of a latent in 8 bits.  The first program
of a token handles its latent, the others its heads' queries.

Order of chained launches (specdec/ops/launch.py): positions and slots are read before gdc_wait, for the reason given in
kernels/rope_store_triton.py.

Shapes: T tokens, H heads, C latent rank, R rotated dim, E = R / 2, G groups of 128 elements of a latent.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec.attention.caches.fp8_latent import MIN_LATENT_SCALE
from specdec.attention.caches.latent_view import LatentView
from specdec.attention.caches.quant_cache import FP8_MAX
from specdec.attention.latent.keys import LatentKeys
from specdec.attention.latent.prep import LatentPrep
from specdec.ops.launch import chained

MAX_FP8, MIN_SCALE = tl.constexpr(FP8_MAX), tl.constexpr(MIN_LATENT_SCALE)


@triton.jit
def quantised(x_C, PADDED_RANK: tl.constexpr):
    """A latent divided by its scales, as floats that are still to be rounded to float8, and the scales [G]."""
    x_GE = tl.reshape(x_C, [PADDED_RANK // 128, 128])
    scale_G = tl.maximum(tl.div_rn(tl.max(tl.abs(x_GE), 1), MAX_FP8), MIN_SCALE)
    value_GE = tl.clamp(tl.div_rn(x_GE, tl.broadcast_to(scale_G[:, None], [PADDED_RANK // 128, 128])), -MAX_FP8, MAX_FP8)
    return tl.reshape(value_GE, [PADDED_RANK]), scale_G


@triton.jit
def cos_sin_at(table, position, e, ok_E, HALF: tl.constexpr):
    """A position's cosines and sines, for the lower and the upper half of rotated pairs: (cos, cos, sin, sin)."""
    cos_sin_E = table + position * (4 * HALF) + e
    cos_low_E = tl.load(cos_sin_E, mask=ok_E, other=0.0).to(tl.float32)
    cos_high_E = tl.load(cos_sin_E + HALF, mask=ok_E, other=0.0).to(tl.float32)
    sin_low_E = tl.load(cos_sin_E + 2 * HALF, mask=ok_E, other=0.0).to(tl.float32)
    sin_high_E = tl.load(cos_sin_E + 3 * HALF, mask=ok_E, other=0.0).to(tl.float32)
    return cos_low_E, cos_high_E, sin_low_E, sin_high_E


@triton.jit
def rotated(at, ok, cos_sin, HALF: tl.constexpr):
    """Both halves of rotated pairs: x * cos + rotate_half(x) * sin.  The sine table carries the sign of rotate_half."""
    cos_low_E, cos_high_E, sin_low_E, sin_high_E = cos_sin
    low = tl.load(at, mask=ok, other=0.0).to(tl.float32)
    high = tl.load(at + HALF, mask=ok, other=0.0).to(tl.float32)
    return low * cos_low_E + high * sin_low_E, high * cos_high_E + low * sin_high_E


@triton.jit
def store_pairs(pairs, to, ok, HALF: tl.constexpr):
    """Stores both halves, rounded."""
    tl.store(to, pairs[0].to(to.dtype.element_ty), mask=ok)
    tl.store(to + HALF, pairs[1].to(to.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize_on_alignment=["slots", "positions"])
def store_latent_kernel(
    q,  # [T, H, R], any strides but the last
    fresh,  # [T, C + R]
    latent,  # [slots, C], any float type
    rope,  # [slots, R]
    scales,  # [slots, C / 128] float32
    slots,  # [T] int64
    positions,  # [T] int64
    table,  # [P, 2, R]
    norm,  # [C]
    out,  # [T, H, R], any strides but the last
    eps,
    stride_qt,
    stride_qh,
    stride_fresh,
    stride_ot,
    stride_oh,
    LATENT_STRIDE: tl.constexpr,
    ROPE_STRIDE: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
    SCALED: tl.constexpr,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    PADDED_RANK: tl.constexpr,
    HALF: tl.constexpr,
    PADDED_HALF: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, PADDED_HALF)
    ok_E = e < HALF
    position = tl.load(positions + token, cache_modifier=".cg")
    slot = tl.load(slots + token, cache_modifier=".cg")
    cos_sin = cos_sin_at(table, position, e, ok_E, HALF)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    fresh += token * stride_fresh
    if tl.program_id(1) == 0:
        c = tl.arange(0, PADDED_RANK)
        ok_C = c < RANK
        x_C = tl.load(fresh + c, mask=ok_C, other=0.0).to(tl.float32)
        weight_C = tl.load(norm + c, mask=ok_C, other=0.0).to(tl.float32)
        x_C = x_C * tl.rsqrt(tl.sum(x_C * x_C, 0) / RANK + eps) * weight_C
        if SCALED:
            x_C = x_C.to(fresh.dtype.element_ty).to(tl.float32)  # rounded as in a cache without scales
            x_C, scale_G = quantised(x_C, PADDED_RANK)
            g = tl.arange(0, PADDED_RANK // 128)
            tl.store(scales + slot * SCALES_STRIDE + g, scale_G, mask=g < RANK // 128)
        tl.store(latent + slot * LATENT_STRIDE + c, x_C.to(latent.dtype.element_ty), mask=ok_C)
        store_pairs(rotated(fresh + RANK + e, ok_E, cos_sin, HALF), rope + slot * ROPE_STRIDE + e, ok_E, HALF)
    else:
        h = (tl.program_id(1) - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        ok_HE = (h < HEADS)[:, None] & ok_E[None, :]
        at_HE = q + token * stride_qt + h[:, None] * stride_qh + e[None, :]
        pairs_HE = rotated(at_HE, ok_HE, cos_sin, HALF)
        store_pairs(pairs_HE, out + token * stride_ot + h[:, None] * stride_oh + e[None, :], ok_HE, HALF)


def launch_store_latent(
    view: LatentView, q_THR: Tensor, fresh_TL: Tensor, slots_T: Tensor, prep: LatentPrep, out_THR: Tensor
) -> None:
    """`mla.store_latent` into the view's slots; the rotated queries [T, H, R] go to out_THR."""
    (T, H, R), C, keys = q_THR.shape, view.rank, LatentKeys.of(view)
    table = prep.rotation.table_P2D
    assert fresh_TL.shape == (T, C + R) and table.shape[1:] == (2, R) and table.is_contiguous() and prep.norm_C.shape == (C,)
    assert q_THR.stride(2) == out_THR.stride(2) == fresh_TL.stride(1) == 1 and slots_T.shape == (T,)
    block_h = min(triton.next_power_of_2(H), 32)
    if T:
        store_latent_kernel[(T, 1 + triton.cdiv(H, block_h))](
            q_THR, fresh_TL, *keys.pointers, slots_T.contiguous(), prep.rotation.positions_T.contiguous(), table, prep.norm_C,
            out_THR, prep.eps, *q_THR.stride()[:2], fresh_TL.stride(0), *out_THR.stride()[:2],
            HEADS=H, RANK=C, PADDED_RANK=triton.next_power_of_2(C), HALF=R // 2,
            PADDED_HALF=triton.next_power_of_2(R // 2), BLOCK_H=block_h, num_warps=2, **keys.options, **chained(q_THR.device),
        )  # fmt: skip
