"""How kernels of experts multiply rows of a matrix, in 16, 8 or 4 bits, with rows of x, 128 columns at a step.

A step's quantised values are converted in registers to x's dtype, in which each is exact (convert_triton.py), and multiplied;
scales multiply float32 sums over their columns.  So nothing is rounded before the end.  Values of 16 bits (KIND "dense") are
multiplied as they are.  This module knows no expert.

Shapes: M rows of x, K in, N out, J words of a row, G scales of a row, S steps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.ops.products.kernels.experts.convert_triton import convert_4, convert_8, enlarged


@triton.jit
def product(
    x_M, ok_M, qweight_N, scales_N, zero_points_N, K: tl.constexpr,
    KIND: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALES: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr, ASM: tl.constexpr,
    ENLARGES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[N, M] float32: rows of a matrix times rows of x.

    ENLARGES: whether x is still to be multiplied by LARGE, where it must be; else it was.
    SCALES: as `scales_form` names them.  They are read a step ahead, because the loop's pipeline holds only what is multiplied.
    """
    STEPS: tl.constexpr = (K + 127) // 128
    acc_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    next_N = scale_at(scales_N, 0, K, GROUP_SIZE, SCALES)
    for first in tl.range(0, STEPS, UNROLL, num_stages=STAGES):
        for n in tl.static_range(UNROLL):
            step = first + n
            now_N = next_N
            next_N = scale_at(scales_N, tl.minimum(step + 1, STEPS - 1) * 128, K, GROUP_SIZE, SCALES)
            acc_NM = add_step(
                acc_NM, x_M, ok_M, qweight_N, scales_N, zero_points_N, now_N, step, K,
                KIND, GROUP_SIZE, SCALES, HAS_ZERO_POINTS, ASM, ENLARGES, STEPS % UNROLL == 0,
            )  # fmt: skip
    if SCALES == "row":
        acc_NM *= next_N.to(tl.float32)[:, None]
    return unenlarged(acc_NM, KIND, ASM)


@triton.jit
def unenlarged(acc_NM, KIND: tl.constexpr, ASM: tl.constexpr):
    """Sums without what LARGE, and the places of quantised values' bits, have multiplied them by."""
    if ASM and KIND == "e2m1":
        acc_NM *= 4.611686018427388e18  # 2^(126 - 64)
    elif ASM and KIND == "e4m3":
        acc_NM *= 7.205759403792794e16  # 2^(120 - 64)
    return acc_NM


@triton.jit
def add_step(
    acc_NM, x_M, ok_M, qweight_N, scales_N, zero_points_N, now_N, step, K: tl.constexpr,
    KIND: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALES: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr, ASM: tl.constexpr,
    ENLARGES: tl.constexpr, EXISTS: tl.constexpr,
):  # fmt: skip
    """acc_NM plus the products of a step's columns.  now_N: their scale, or scales.  EXISTS: whether each step does."""
    FOUR: tl.constexpr = KIND == "int4" or KIND == "e2m1"
    WORDS: tl.constexpr = 128 if KIND == "dense" else 32 if FOUR else 64
    EVEN_K: tl.constexpr = K % 128 == 0 and EXISTS
    at, j = step * 128, tl.arange(0, WORDS)
    at_J = step * WORDS + j
    if EVEN_K or (EXISTS and KIND != "dense"):
        words_NJ = tl.load(qweight_N[:, None] + at_J[None, :])
    else:
        END: tl.constexpr = K if KIND == "dense" else (K + 127) // 128 * WORDS
        words_NJ = tl.load(qweight_N[:, None] + at_J[None, :], mask=(at_J < END)[None, :], other=0)
    if KIND == "dense":
        x_MJ = _columns(x_M, at + j, ok_M, K, EVEN_K, False)
        acc_NM = tl.dot(words_NJ, tl.trans(x_MJ), acc_NM, input_precision="ieee")
    else:
        SMALL: tl.constexpr = ASM and ENLARGES and (KIND == "e2m1" or KIND == "e4m3")
        acc_NM = _add_quantised(
            acc_NM, words_NJ, x_M, at, at + (j if FOUR else j // 32 * 64 + j % 32), ok_M, now_N, scales_N, zero_points_N, K,
            KIND, GROUP_SIZE, SCALES, HAS_ZERO_POINTS, ASM, SMALL, FOUR, EVEN_K,
        )  # fmt: skip
    return acc_NM


@triton.jit
def _add_quantised(
    acc_NM, words_NJ, x_M, at, k, ok_M, now_N, scales_N, zero_points_N, K: tl.constexpr,
    KIND: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALES: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr, ASM: tl.constexpr,
    SMALL: tl.constexpr, FOUR: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """`add_step` of quantised words; `at`: its first column.  SMALL: whether x is multiplied by LARGE here."""
    DTYPE: tl.constexpr = x_M.dtype.element_ty
    a_MJ = _columns(x_M, k, ok_M, K, EVEN_K, SMALL)
    b_MJ = _columns(x_M, k + 32, ok_M, K, EVEN_K, SMALL)
    if FOUR:
        c_MJ = _columns(x_M, k + 64, ok_M, K, EVEN_K, SMALL)
        d_MJ = _columns(x_M, k + 96, ok_M, K, EVEN_K, SMALL)
        a_NJ, b_NJ, c_NJ, d_NJ = convert_4(words_NJ, KIND, ASM, DTYPE)
    else:
        a_NJ, b_NJ = convert_8(words_NJ, KIND, ASM, DTYPE)
    if HAS_ZERO_POINTS:
        a_NJ -= _zero(zero_points_N, at, K, GROUP_SIZE).to(DTYPE)[:, None]
        b_NJ -= _zero(zero_points_N, at + 32, K, GROUP_SIZE).to(DTYPE)[:, None]
        if FOUR:
            c_NJ -= _zero(zero_points_N, at + 64, K, GROUP_SIZE).to(DTYPE)[:, None]
            d_NJ -= _zero(zero_points_N, at + 96, K, GROUP_SIZE).to(DTYPE)[:, None]
    if SCALES == "row":
        acc_NM = tl.dot(a_NJ, tl.trans(a_MJ), acc_NM, input_precision="ieee")
        acc_NM = tl.dot(b_NJ, tl.trans(b_MJ), acc_NM, input_precision="ieee")
        if FOUR:
            acc_NM = tl.dot(c_NJ, tl.trans(c_MJ), acc_NM, input_precision="ieee")
            acc_NM = tl.dot(d_NJ, tl.trans(d_MJ), acc_NM, input_precision="ieee")
    elif SCALES == "step":
        part_NM = tl.dot(a_NJ, tl.trans(a_MJ), input_precision="ieee")
        part_NM = tl.dot(b_NJ, tl.trans(b_MJ), part_NM, input_precision="ieee")
        if FOUR:
            part_NM = tl.dot(c_NJ, tl.trans(c_MJ), part_NM, input_precision="ieee")
            part_NM = tl.dot(d_NJ, tl.trans(d_MJ), part_NM, input_precision="ieee")
        acc_NM += part_NM * now_N.to(tl.float32)[:, None]
    elif SCALES == "powers":
        acc_NM += tl.dot(a_NJ, tl.trans(a_MJ), input_precision="ieee") * _power(now_N)[:, None]
        acc_NM += tl.dot(b_NJ, tl.trans(b_MJ), input_precision="ieee") * _power(now_N >> 8)[:, None]
        acc_NM += tl.dot(c_NJ, tl.trans(c_MJ), input_precision="ieee") * _power(now_N >> 16)[:, None]
        acc_NM += tl.dot(d_NJ, tl.trans(d_MJ), input_precision="ieee") * _power(now_N >> 24)[:, None]
    else:
        acc_NM += tl.dot(a_NJ, tl.trans(a_MJ), input_precision="ieee") * now_N.to(tl.float32)[:, None]
        b_N = scale_at(scales_N, at + 32, K, GROUP_SIZE, SCALES).to(tl.float32)
        acc_NM += tl.dot(b_NJ, tl.trans(b_MJ), input_precision="ieee") * b_N[:, None]
        c_N = scale_at(scales_N, at + 64, K, GROUP_SIZE, SCALES).to(tl.float32)
        acc_NM += tl.dot(c_NJ, tl.trans(c_MJ), input_precision="ieee") * c_N[:, None]
        d_N = scale_at(scales_N, at + 96, K, GROUP_SIZE, SCALES).to(tl.float32)
        acc_NM += tl.dot(d_NJ, tl.trans(d_MJ), input_precision="ieee") * d_N[:, None]
    return acc_NM


@triton.jit
def _columns(x_M, at_J, ok_M, K: tl.constexpr, EVEN_K: tl.constexpr, ENLARGES: tl.constexpr):
    """These columns of x, [M, J]; 0 beyond the last one."""
    ok_MJ = ok_M[:, None] if EVEN_K else ok_M[:, None] & (at_J < K)[None, :]
    x_MJ = tl.load(x_M[:, None] + at_J[None, :], mask=ok_MJ, other=0.0)
    return enlarged(x_MJ) if ENLARGES else x_MJ


@triton.jit
def scale_at(scales_N, column, K: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALES: tl.constexpr):
    """The scale of a column's group, or a step's word of exponents; of a column that is not there, any.  0 where none is."""
    if SCALES == "none":
        found_N = tl.zeros([scales_N.shape[0]], tl.float32)
    elif SCALES == "powers":
        found_N = tl.load(scales_N + column // 128)
    elif SCALES == "row":
        found_N = tl.load(scales_N)
    else:
        found_N = tl.load(scales_N + tl.minimum(column, K - 1) // GROUP_SIZE)
    return found_N


@triton.jit
def _zero(zero_points_N, column, K: tl.constexpr, GROUP_SIZE: tl.constexpr):
    return tl.load(zero_points_N + (tl.minimum(column, K - 1) // GROUP_SIZE if GROUP_SIZE > 0 else 0)).to(tl.float32)


@triton.jit
def _power(word_N):
    """2^(e - 127) of the exponent in the lowest 8 bits; 0 in place of 2^-127, which float32 has no normal number for."""
    return ((word_N & 0xFF) << 23).to(tl.float32, bitcast=True)
