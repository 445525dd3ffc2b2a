"""Rounding to int8 inside kernels, as `to_int8` (caches/quant_cache.py) defines it, bit for bit.

Shapes: M queries x heads of a tile, D head dim.
"""

import triton
import triton.language as tl

from specdec.attention.caches.quant_cache import INT8_MAX, MIN_INT8_SCALE

MAX_INT8, MIN_SCALE = tl.constexpr(INT8_MAX), tl.constexpr(MIN_INT8_SCALE)


@triton.jit
def round_to_int8(x, inverse):
    """The nearest int8 of x * inverse as a float; ties go up.

    The clamp keeps the compiler from fusing product and sum, which would round differently.
    """
    return tl.floor(tl.clamp(x * inverse, -MAX_INT8, MAX_INT8) + 0.5)


@triton.jit
def scale_and_inverse(amax):
    """The scale of heads whose largest absolute values these are, and 1 / scale; 0 where the scale is too small to be divided
    by.
    """
    scale = amax * (1 / MAX_INT8)
    is_some = scale > MIN_SCALE
    return scale, tl.where(is_some, tl.div_rn(1.0, tl.where(is_some, scale, 1.0)), 0.0)


@triton.jit
def abs_or_inf(x):
    """|x|, and infinity for NaN, which a maximum would ignore."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def queries_in_int8(q_MD):
    """Queries in int8, and the scale of each, [M, 1] float32."""
    q_MD = q_MD.to(tl.float32)
    scale_M, inverse_M = scale_and_inverse(tl.max(abs_or_inf(q_MD), 1))
    return round_to_int8(q_MD, inverse_M[:, None]).to(tl.int8), scale_M[:, None]
