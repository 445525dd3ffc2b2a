"""The kernel of a product with few rows and a weight of 8 or 4 bits, which streams the weight once.

It is ops/products/kernels/dense/stream_triton.py's kernel, whose docstring explains tiles, splits and chained launches, for
quantised values instead of dense ones.  A tile of them is converted in registers to x's dtype, in which each is exact, and
multiplied; scales multiply float32 sums.  So nothing is rounded before the end.

- A scale for each row is applied once, to the complete sum.
- A scale for each group of columns is applied to the sum over that group: a step is one group, or a part of one.  It is read a
  step ahead, because the loop's pipeline holds only what is multiplied.

Two values of 8 bits or four of 4 bits lie in a word (see formats/quantised.py): a tile of words becomes two or four tiles of
unscaled values, which are multiplied with as many tiles of x.

Shapes: M rows, K in, N out; a gated product has F = N, and its weight has 2F rows: gate rows first, then up rows.  J words of a
row of qweight, G groups of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.products.kernels.dense.stream_triton import complete, prefetch, result_of, rows_of_tile

if TYPE_CHECKING:
    from specdec.ops.products.formats.quantised import QuantisedMatrix
    from specdec.ops.products.tiles.quantised import QuantisedTiles

PREFETCH = 512  # bytes of each row that are prefetched into L2 before the wait


# PTX for two words of quantised values in a register: each place in a word gives a pair of bfloat16.
# e4m3: the sign, and the other bits 4 places lower, are the value * 2^-120 in bfloat16.
E4M3_ASM = tl.constexpr("""{ .reg .b32 t, u, s, k; mov.b32 k, 0x7b807b80;
shl.b32 u, $2, 4; shl.b32 t, $2, 8; and.b32 s, t, 0x80008000; lop3.b32 u, u, 0x07f007f0, s, 0xea; mul.bf16x2 $0, u, k;
shr.b32 u, $2, 4; and.b32 s, $2, 0x80008000; lop3.b32 u, u, 0x07f007f0, s, 0xea; mul.bf16x2 $1, u, k; }""")
# int8: the low 7 bits under the exponent of 128, minus 128 where the stored byte is 128 or more, else minus 256.
INT8_ASM = tl.constexpr("""{ .reg .b32 t, u, v, m, n; mov.b32 m, 0x43004300; mov.b32 n, 0x43804380;
lop3.b32 u, $2, 0x007f007f, m, 0xea; lop3.b32 v, $2, 0x00800080, n, 0x6a; sub.bf16x2 $0, u, v;
shr.b32 t, $2, 8;
lop3.b32 u, t, 0x007f007f, m, 0xea; lop3.b32 v, t, 0x00800080, n, 0x6a; sub.bf16x2 $1, u, v; }""")
# int4: a nibble under the exponent of 128 is 128 + nibble; the value is nibble - 8 - zero point.  $5, $6: 136 + zero point of
# the first two values of a word and of the last two.
INT4_ASM = tl.constexpr("""{ .reg .b32 t, u, m; mov.b32 m, 0x43004300;
lop3.b32 u, $4, 0x000f000f, m, 0xea; sub.bf16x2 $0, u, $5;
shr.b32 t, $4, 4; lop3.b32 u, t, 0x000f000f, m, 0xea; sub.bf16x2 $1, u, $5;
shr.b32 t, $4, 8; lop3.b32 u, t, 0x000f000f, m, 0xea; sub.bf16x2 $2, u, $6;
shr.b32 t, $4, 12; lop3.b32 u, t, 0x000f000f, m, 0xea; sub.bf16x2 $3, u, $6; }""")
# e2m1: the sign, and the other bits 6 places lower, are the value * 2^-126 in bfloat16.
E2M1_ASM = tl.constexpr("""{ .reg .b32 t, u, s, k; mov.b32 k, 0x7e807e80;
shl.b32 u, $4, 6; shl.b32 t, $4, 12; and.b32 s, t, 0x80008000; lop3.b32 u, u, 0x01c001c0, s, 0xea; mul.bf16x2 $0, u, k;
shl.b32 u, $4, 2; shl.b32 t, $4, 8; and.b32 s, t, 0x80008000; lop3.b32 u, u, 0x01c001c0, s, 0xea; mul.bf16x2 $1, u, k;
shr.b32 u, $4, 2; shl.b32 t, $4, 4; and.b32 s, t, 0x80008000; lop3.b32 u, u, 0x01c001c0, s, 0xea; mul.bf16x2 $2, u, k;
shr.b32 u, $4, 6; and.b32 s, $4, 0x80008000; lop3.b32 u, u, 0x01c001c0, s, 0xea; mul.bf16x2 $3, u, k; }""")


@triton.jit(do_not_specialize=["M"])  # for the reason given at linear_kernel
def quantised_linear_kernel(
    x,  # [M, K]
    qweight,  # words [N, J], or [2 * N, J] if GATED
    scales,  # [N, G] or [2 * N, G]
    zero_points,  # as scales
    bias,  # [N] or [2 * N]
    y,  # [M, N]
    partials,  # [tiles, SPLITS, BLOCK_N, BLOCK_M] float32
    arrivals,  # [ARRIVALS] int32, zero before and after
    M, N, K, J, G, stride_x,
    KIND: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr, ASM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    split = tl.program_id(1)
    r = tl.arange(0, BLOCK_N)
    out_N, row_N = rows_of_tile(tile, N, BLOCK_N, GATED)
    row_N = row_N.to(tl.int64)
    if not EVEN_N:
        row_N = tl.where(out_N < N, row_N, 0)  # an out-of-range row reads row 0; its result is not stored
    TILES: tl.constexpr = 4 if KIND == "int4" or KIND == "e2m1" else 2  # values of a word, which belong to as many tiles
    RUN: tl.constexpr = TILES * 16
    STEP: tl.constexpr = (
        BLOCK_K if GROUP_SIZE == 0 or BLOCK_K < GROUP_SIZE else max(GROUP_SIZE, RUN)
    )  # columns that are multiplied at once
    BLOCK_J: tl.constexpr = STEP // TILES
    per_split = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLITS) * BLOCK_K
    low = split * per_split
    high = tl.minimum(low + per_split, K)
    qweight_N = qweight + row_N * J
    if PDL:
        ahead = low // TILES + tl.arange(0, PREFETCH // 128) * 64
        prefetch(qweight_N[:, None] + ahead[None, :], (r >= 0)[:, None] & (ahead < tl.cdiv(high, TILES))[None, :])
        tl.extra.cuda.gdc_wait()

    first_m = tl.program_id(2) * BLOCK_M
    x += first_m.to(tl.int64) * stride_x
    y += first_m.to(tl.int64) * N
    M -= first_m
    m = tl.arange(0, BLOCK_M)
    j = tl.arange(0, BLOCK_J)
    k = j // 16 * RUN + j % 16
    ok_M = m < M
    x_M = x + m * stride_x
    scales_N, zero_points_N = scales + row_N * G, zero_points + row_N * G
    acc_NM = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    zero_point_N = tl.zeros([BLOCK_N], tl.float32)
    scale_N = tl.load(scales_N + (low // GROUP_SIZE if GROUP_SIZE > 0 else 0))
    if HAS_ZERO_POINTS:
        zero_point_N = tl.load(zero_points_N + (low // GROUP_SIZE if GROUP_SIZE > 0 else 0)).to(tl.float32)
    other_zero_point_N = zero_point_N
    halfway = low + (high - low) // BLOCK_K // 2 * BLOCK_K
    for step_k in tl.range(low, high, BLOCK_K, num_stages=STAGES):
        if PDL:
            if step_k == halfway:
                tl.extra.cuda.gdc_launch_dependents()
        for n in tl.static_range(BLOCK_K // STEP):
            at = step_k + n * STEP
            at_J = at // TILES + j
            at_K = at + k
            if EVEN_K:
                words_NJ = tl.load(qweight_N[:, None] + at_J[None, :])
            else:
                words_NJ = tl.load(qweight_N[:, None] + at_J[None, :], mask=(at_J < J)[None, :], other=0)
            a_MJ = _columns(x_M, at_K, ok_M, high, EVEN_K)
            b_MJ = _columns(x_M, at_K + 16, ok_M, high, EVEN_K)
            if TILES == 4:
                c_MJ = _columns(x_M, at_K + 32, ok_M, high, EVEN_K)
                d_MJ = _columns(x_M, at_K + 48, ok_M, high, EVEN_K)
                if HAS_ZERO_POINTS and GROUP_SIZE > 0 and GROUP_SIZE < RUN:
                    other_zero_point_N = tl.load(zero_points_N + tl.minimum(at + GROUP_SIZE, high - 1) // GROUP_SIZE).to(
                        tl.float32
                    )
                    a_NJ, b_NJ, c_NJ, d_NJ = values_of_4_bits(
                        words_NJ, zero_point_N, other_zero_point_N, KIND, HAS_ZERO_POINTS, ASM, x.dtype.element_ty
                    )
                else:
                    a_NJ, b_NJ, c_NJ, d_NJ = values_of_4_bits(
                        words_NJ, zero_point_N, zero_point_N, KIND, HAS_ZERO_POINTS, ASM, x.dtype.element_ty
                    )
            else:
                a_NJ, b_NJ = values_of_8_bits(words_NJ, zero_point_N, KIND, HAS_ZERO_POINTS, ASM, x.dtype.element_ty)
            if GROUP_SIZE == 0:
                acc_NM = tl.dot(a_NJ, tl.trans(a_MJ), acc_NM, input_precision="ieee")
                acc_NM = tl.dot(b_NJ, tl.trans(b_MJ), acc_NM, input_precision="ieee")
                if TILES == 4:
                    acc_NM = tl.dot(c_NJ, tl.trans(c_MJ), acc_NM, input_precision="ieee")
                    acc_NM = tl.dot(d_NJ, tl.trans(d_MJ), acc_NM, input_precision="ieee")
            else:
                now_N = scale_N.to(tl.float32)
                ahead_g = tl.minimum(at + STEP, high - 1) // GROUP_SIZE
                scale_N = tl.load(scales_N + ahead_g)
                part_NM = tl.dot(a_NJ, tl.trans(a_MJ), input_precision="ieee")
                if GROUP_SIZE < 32:
                    acc_NM += part_NM * now_N[:, None]
                    now_N = _scale(scales_N, at + 16, high, GROUP_SIZE)
                    part_NM = tl.dot(b_NJ, tl.trans(b_MJ), input_precision="ieee")
                else:
                    part_NM = tl.dot(b_NJ, tl.trans(b_MJ), part_NM, input_precision="ieee")
                if TILES == 4:
                    if GROUP_SIZE < RUN:
                        acc_NM += part_NM * now_N[:, None]
                        now_N = _scale(scales_N, at + 32, high, GROUP_SIZE)
                        part_NM = tl.dot(c_NJ, tl.trans(c_MJ), input_precision="ieee")
                    else:
                        part_NM = tl.dot(c_NJ, tl.trans(c_MJ), part_NM, input_precision="ieee")
                    if GROUP_SIZE < 32:
                        acc_NM += part_NM * now_N[:, None]
                        now_N = _scale(scales_N, at + 48, high, GROUP_SIZE)
                        part_NM = tl.dot(d_NJ, tl.trans(d_MJ), input_precision="ieee")
                    else:
                        part_NM = tl.dot(d_NJ, tl.trans(d_MJ), part_NM, input_precision="ieee")
                acc_NM += part_NM * now_N[:, None]
                if HAS_ZERO_POINTS:
                    zero_point_N = tl.load(zero_points_N + ahead_g).to(tl.float32)

    if GROUP_SIZE == 0:
        acc_NM *= tl.load(scales_N).to(tl.float32)[:, None]
    complete(acc_NM, bias, y, partials, arrivals, tile, split, M, N, BLOCK_M, BLOCK_N, SPLITS, GATED, HAS_BIAS)


@triton.jit
def _columns(x_M, at_K, ok_M, high, EVEN_K: tl.constexpr):
    """These columns of x, [M, J]."""
    ok_MJ = ok_M[:, None] if EVEN_K else ok_M[:, None] & (at_K < high)[None, :]
    return tl.load(x_M[:, None] + at_K[None, :], mask=ok_MJ, other=0.0)


@triton.jit
def _scale(scales_N, column, high, GROUP_SIZE: tl.constexpr):
    """The scales of a column's group; of a column that is not there, any."""
    return tl.load(scales_N + tl.minimum(column, high - 1) // GROUP_SIZE).to(tl.float32)


@triton.jit
def values_of_8_bits(
    words_NJ, zero_point_N, KIND: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr, ASM: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """Words of two values of 8 bits as two tiles of unscaled values.  ASM: to bfloat16, two words at a time."""
    if ASM:
        PROGRAM: tl.constexpr = E4M3_ASM if KIND == "e4m3" else INT8_ASM
        a_NJ, b_NJ = tl.inline_asm_elementwise(
            PROGRAM, "=r,=r,r", [words_NJ], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        a_NJ, b_NJ = value_of_8_bits(words_NJ, KIND, DTYPE), value_of_8_bits(words_NJ >> 8, KIND, DTYPE)
    if HAS_ZERO_POINTS:
        a_NJ, b_NJ = a_NJ - zero_point_N.to(DTYPE)[:, None], b_NJ - zero_point_N.to(DTYPE)[:, None]
    return a_NJ, b_NJ


@triton.jit
def value_of_8_bits(word_NJ, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """The unscaled value in the lowest 8 bits."""
    bits_NJ = word_NJ.to(tl.int32)
    if KIND == "e4m3":
        moved_NJ = ((bits_NJ & 0x80) << 24) | ((bits_NJ & 0x7F) << 20)
        return (moved_NJ.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(DTYPE)  # 2^120
    return ((bits_NJ & 0xFF) - 128).to(tl.float32).to(DTYPE)


@triton.jit
def values_of_4_bits(
    words_NJ, zero_point_N, other_zero_point_N, KIND: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr, ASM: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Words of four values of 4 bits as four tiles of unscaled values.  ASM: to bfloat16, two words at a time.

    zero_point_N, other_zero_point_N: those of the first two tiles and of the last two.
    """
    if ASM:
        if KIND == "e2m1":
            a_NJ, b_NJ, c_NJ, d_NJ = tl.inline_asm_elementwise(
                E2M1_ASM, "=r,=r,=r,=r,r", [words_NJ], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True,
                pack=2,
            )  # fmt: skip
        else:  # 136 + zero point is from 128 to 143, which bfloat16 holds
            zero_point_NJ = tl.broadcast_to(tl.expand_dims((zero_point_N + 136).to(tl.bfloat16), -1), words_NJ.shape)
            other_N = tl.expand_dims((other_zero_point_N + 136).to(tl.bfloat16), -1)
            other_zero_point_NJ = tl.broadcast_to(other_N, words_NJ.shape)
            a_NJ, b_NJ, c_NJ, d_NJ = tl.inline_asm_elementwise(
                INT4_ASM, "=r,=r,=r,=r,r,r,r", [words_NJ, zero_point_NJ, other_zero_point_NJ],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
    else:
        a_NJ = value_of_4_bits(words_NJ, zero_point_N, KIND, DTYPE)
        b_NJ = value_of_4_bits(words_NJ >> 4, zero_point_N, KIND, DTYPE)
        c_NJ = value_of_4_bits(words_NJ >> 8, other_zero_point_N, KIND, DTYPE)
        d_NJ = value_of_4_bits(words_NJ >> 12, other_zero_point_N, KIND, DTYPE)
    return a_NJ, b_NJ, c_NJ, d_NJ


@triton.jit
def value_of_4_bits(word_NJ, zero_point_N, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """The unscaled value in the lowest 4 bits, minus the zero point."""
    bits_NJ = word_NJ.to(tl.int32)
    if KIND == "e2m1":
        moved_NJ = ((bits_NJ & 8) << 28) | ((bits_NJ & 7) << 22)
        return (moved_NJ.to(tl.float32, bitcast=True) * 8.507059173023462e37).to(DTYPE)  # 2^126
    return (((bits_NJ & 15) - 8).to(tl.float32) - tl.expand_dims(zero_point_N, -1)).to(DTYPE)


def launch_quantised_linear(
    x_MK: Tensor, weight: QuantisedMatrix, bias_N: Tensor | None, gated: bool, tiles: QuantisedTiles
) -> Tensor:
    """[M, N], or [M, F] if gated.  The rows of x may be strided; a split product has at most tiles.block_m of them.

    What launch_linear says of split products holds here too.
    """
    (M, K), rows = x_MK.shape, weight.qweight_NJ.shape[0]
    N = rows // 2 if gated else rows
    assert 0 < M and (M <= tiles.block_m or tiles.splits == 1) and weight.columns == K and x_MK.stride(1) == 1
    assert bias_N is None or bias_N.shape == (rows,)
    outs = tiles.block_n // 2 if gated else tiles.block_n
    num_tiles = triton.cdiv(N, outs)
    y_MN, partials, arrivals = result_of(x_MK, N, tiles.splits, num_tiles, tiles.block_n, tiles.block_m)
    scales_NG, zero_points_NG = weight.scales_NG, weight.scales_NG if weight.zero_points_NG is None else weight.zero_points_NG
    quantised_linear_kernel[(num_tiles, tiles.splits, triton.cdiv(M, tiles.block_m))](
        x_MK, weight.qweight_NJ.view(torch.int16), scales_NG, zero_points_NG, scales_NG if bias_N is None else bias_N, y_MN,
        partials, arrivals, M, N, K, weight.qweight_NJ.shape[1] // 2, scales_NG.shape[1], x_MK.stride(0),
        KIND=weight.kind, GROUP_SIZE=weight.group_size, HAS_ZERO_POINTS=weight.zero_points_NG is not None,
        ASM=x_MK.dtype == torch.bfloat16 and x_MK.is_cuda,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, SPLITS=tiles.splits, STAGES=tiles.stages,
        GATED=gated, HAS_BIAS=bias_N is not None, EVEN_N=N % outs == 0, EVEN_K=K % tiles.block_k == 0, PREFETCH=PREFETCH,
        num_warps=tiles.warps, num_stages=tiles.stages, **chained(x_MK.device),
    )  # fmt: skip
    return y_MN
