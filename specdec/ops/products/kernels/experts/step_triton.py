"""How kernels of experts multiply rows of a matrix, in 16, 8 or 4 bits, with rows of x, 128 columns at a step.

A step's quantised values are converted in registers to x's dtype, in which each is exact (convert_triton.py), and multiplied;
scales multiply float32 sums over their columns.  So nothing is rounded before the end.  Values of 16 bits (KIND "dense") are
multiplied as they are.  This module knows no expert.

A program's warps may share the columns instead of the rows (SLICES of them): of few rows there are more warps then, which wait
for memory beside each other.  What a slice computes is a product of its own in one product of S matrices, and the sums of the
slices are added up at their end.  All tensors of a step then have a first dimension more, of S slices.

Shapes: M rows of x, K in, N out, J words of a row, G scales of a row, S slices.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.ops.products.kernels.experts.convert_triton import convert_4, convert_8, enlarged


@triton.jit
def product(
    x_M, ok_M, qweight_N, scales_N, zero_points_N, part, K: tl.constexpr,
    KIND: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALES: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr, ASM: tl.constexpr,
    ENLARGES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNROLL: tl.constexpr, PARTS: tl.constexpr,
    SLICES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[N, M] float32: rows of a matrix times rows of x, or that part of PARTS of the columns.

    ENLARGES: whether x is still to be multiplied by LARGE, where it must be; else it was.
    SCALES: as `scales_form` names them.  They are read a step ahead, because the loop's pipeline holds only what is multiplied.
    """
    STEPS: tl.constexpr = (K + 127) // 128
    SHARES: tl.constexpr = PARTS * SLICES
    EACH: tl.constexpr = (STEPS + SHARES * UNROLL - 1) // (SHARES * UNROLL) * UNROLL  # of a slice
    last_N = tl.load(scales_N) if SCALES == "row" else scales_N
    base = part * (SLICES * EACH * 128) if PARTS > 1 else 0
    if SLICES > 1:
        base += tl.arange(0, SLICES)[:, None] * (EACH * 128)
        x_M, ok_M, qweight_N = x_M[None, :], ok_M[None, :], qweight_N[None, :]
        scales_N, zero_points_N = scales_N[None, :], zero_points_N[None, :]
    acc_NM = no_sums(BLOCK_N, BLOCK_M, SLICES)
    LAST: tl.constexpr = STEPS * 128 - 128  # beyond which a slice's steps find no scales
    next_N = scale_at(scales_N, tl.minimum(base, LAST), K, GROUP_SIZE, SCALES)
    for first in tl.range(0, EACH, UNROLL, num_stages=STAGES):
        for n in tl.static_range(UNROLL):
            at = base + (first + n) * 128
            now_N = next_N
            next_N = scale_at(scales_N, tl.minimum(at + 128, LAST), K, GROUP_SIZE, SCALES)
            acc_NM = add_step(
                acc_NM, x_M, ok_M, qweight_N, scales_N, zero_points_N, now_N, at, K,
                KIND, GROUP_SIZE, SCALES, HAS_ZERO_POINTS, ASM, ENLARGES, STEPS % (SHARES * UNROLL) == 0, SLICES,
            )  # fmt: skip
    if SLICES > 1:
        acc_NM = tl.sum(acc_NM, 0)
    if SCALES == "row":
        acc_NM *= last_N.to(tl.float32)[:, None]
    return unenlarged(acc_NM, KIND, ASM)


@triton.jit
def no_sums(N: tl.constexpr, M: tl.constexpr, SLICES: tl.constexpr):
    """[N, M] of zeros, or [S, N, M]."""
    return tl.zeros([N, M], tl.float32) if SLICES == 1 else tl.zeros([SLICES, N, M], tl.float32)


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
    acc_NM, x_M, ok_M, qweight_N, scales_N, zero_points_N, now_N, at, K: tl.constexpr,
    KIND: tl.constexpr, GROUP_SIZE: tl.constexpr, SCALES: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr, ASM: tl.constexpr,
    ENLARGES: tl.constexpr, EXISTS: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """acc_NM plus the products of a step's columns, the first of which is `at`.  now_N: their scale, or scales.

    EXISTS: whether each step does.  With slices, `at` is [S, 1], and sizes N and M are those of [1, N] and [1, M].
    """
    FOUR: tl.constexpr = KIND == "int4" or KIND == "e2m1"
    WORDS: tl.constexpr = 128 if KIND == "dense" else 32 if FOUR else 64
    EVEN_K: tl.constexpr = K % 128 == 0 and EXISTS
    j = tl.arange(0, WORDS)
    here = at if EXISTS or KIND == "dense" else tl.minimum(at, (K + 127) // 128 * 128 - 128)  # of x there are zeros then
    at_J = _after(here // 128 * WORDS, j, SLICES)
    if EVEN_K or KIND != "dense":
        words_NJ = tl.load(tl.expand_dims(qweight_N, -1) + at_J)
    else:
        words_NJ = tl.load(tl.expand_dims(qweight_N, -1) + at_J, mask=at_J < K, other=0)
    if KIND == "dense":
        acc_NM = _dot(words_NJ, _columns(x_M, _after(at, j, SLICES), ok_M, at, K, EVEN_K, False, False), acc_NM)
    else:
        SMALL: tl.constexpr = ASM and ENLARGES and (KIND == "e2m1" or KIND == "e4m3")
        k = _after(at, j if FOUR else j // 32 * 64 + j % 32, SLICES)
        acc_NM = _add_quantised(
            acc_NM, words_NJ, x_M, at, k, ok_M, now_N, scales_N, zero_points_N, K,
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
    WHOLE: tl.constexpr = FOUR and K % 32 == 0
    a_MJ = _columns(x_M, k, ok_M, at, K, EVEN_K, WHOLE, SMALL)
    b_MJ = _columns(x_M, k + 32, ok_M, at + 32, K, EVEN_K, WHOLE, SMALL)
    if FOUR:
        c_MJ = _columns(x_M, k + 64, ok_M, at + 64, K, EVEN_K, WHOLE, SMALL)
        d_MJ = _columns(x_M, k + 96, ok_M, at + 96, K, EVEN_K, WHOLE, SMALL)
        a_NJ, b_NJ, c_NJ, d_NJ = convert_4(words_NJ, KIND, ASM, DTYPE)
    else:
        a_NJ, b_NJ = convert_8(words_NJ, KIND, ASM, DTYPE)
    if HAS_ZERO_POINTS:
        a_NJ -= _zero(zero_points_N, at, K, GROUP_SIZE, DTYPE)
        b_NJ -= _zero(zero_points_N, at + 32, K, GROUP_SIZE, DTYPE)
        if FOUR:
            c_NJ -= _zero(zero_points_N, at + 64, K, GROUP_SIZE, DTYPE)
            d_NJ -= _zero(zero_points_N, at + 96, K, GROUP_SIZE, DTYPE)
    if SCALES == "row":
        acc_NM = _dot(b_NJ, b_MJ, _dot(a_NJ, a_MJ, acc_NM))
        if FOUR:
            acc_NM = _dot(d_NJ, d_MJ, _dot(c_NJ, c_MJ, acc_NM))
    elif SCALES == "step":
        part_NM = _dot(b_NJ, b_MJ, _dot(a_NJ, a_MJ))
        if FOUR:
            part_NM = _dot(d_NJ, d_MJ, _dot(c_NJ, c_MJ, part_NM))
        acc_NM += part_NM * tl.expand_dims(now_N.to(tl.float32), -1)
    elif SCALES == "powers":
        acc_NM += _dot(a_NJ, a_MJ) * _power(now_N)
        acc_NM += _dot(b_NJ, b_MJ) * _power(now_N >> 8)
        acc_NM += _dot(c_NJ, c_MJ) * _power(now_N >> 16)
        acc_NM += _dot(d_NJ, d_MJ) * _power(now_N >> 24)
    else:
        acc_NM += _dot(a_NJ, a_MJ) * tl.expand_dims(now_N.to(tl.float32), -1)
        b_N = scale_at(scales_N, at + 32, K, GROUP_SIZE, SCALES).to(tl.float32)
        acc_NM += _dot(b_NJ, b_MJ) * tl.expand_dims(b_N, -1)
        c_N = scale_at(scales_N, at + 64, K, GROUP_SIZE, SCALES).to(tl.float32)
        acc_NM += _dot(c_NJ, c_MJ) * tl.expand_dims(c_N, -1)
        d_N = scale_at(scales_N, at + 96, K, GROUP_SIZE, SCALES).to(tl.float32)
        acc_NM += _dot(d_NJ, d_MJ) * tl.expand_dims(d_N, -1)
    return acc_NM


@triton.jit
def _after(at, j, SLICES: tl.constexpr):
    """[J]: places from `at` on; with slices [S, 1, J], from those of [S, 1] on."""
    if SLICES == 1:
        at_J = at + j
    else:
        at_J = tl.expand_dims(at, -1) + j[None, None, :]
    return at_J


@triton.jit
def _dot(w_NJ, x_MJ, acc_NM=None):
    """[N, M] float32, or [S, N, M] of S products; plus acc_NM."""
    if len(w_NJ.shape) == 2:
        x_JM = tl.trans(x_MJ)
    else:
        x_JM = tl.permute(x_MJ, (0, 2, 1))
    return tl.dot(w_NJ, x_JM, acc_NM, input_precision="ieee")


@triton.jit
def _columns(
    x_M, at_J, ok_M, first, K: tl.constexpr, EVEN_K: tl.constexpr, WHOLE: tl.constexpr, ENLARGES: tl.constexpr
):  # fmt: skip
    """These columns of x, [M, J]; 0 beyond the last one.  WHOLE: all of them are there if the first one is."""
    if EVEN_K:
        ok_MJ = tl.expand_dims(ok_M, -1)
    elif WHOLE:
        ok_MJ = tl.expand_dims(ok_M & (first < K), -1)
    else:
        ok_MJ = tl.expand_dims(ok_M, -1) & (at_J < K)
    x_MJ = tl.load(tl.expand_dims(x_M, -1) + at_J, mask=ok_MJ, other=0.0)
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
def _zero(zero_points_N, column, K: tl.constexpr, GROUP_SIZE: tl.constexpr, DTYPE: tl.constexpr):
    zero_N = tl.load(zero_points_N + (tl.minimum(column, K - 1) // GROUP_SIZE if GROUP_SIZE > 0 else 0))
    return tl.expand_dims(zero_N.to(DTYPE), -1)


@triton.jit
def _power(word_N):
    """2^(e - 127) of the exponent in the lowest 8 bits; 0 in place of 2^-127, which float32 has no normal number for."""
    return tl.expand_dims(((word_N & 0xFF) << 23).to(tl.float32, bitcast=True), -1)
