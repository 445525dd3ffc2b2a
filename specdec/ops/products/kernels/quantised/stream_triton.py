"""The kernel of a product with few rows and a weight of 8 or 4 bits, which streams the weight once.

It is ops/products/kernels/dense/stream_triton.py's kernel, whose docstring explains tiles, splits and chained launches, over
codes instead of numbers.  A tile of codes is converted in registers to x's dtype, in which every code is exact, and multiplied;
scales multiply float32 sums.  So nothing is rounded before the end.

- A scale for each row is applied once, to the complete sum.
- A scale for each group of columns is applied to the sum over that group: a step is one group, or a part of one.  It is read a
  step ahead, because the loop's pipeline holds only what is multiplied.

Two codes of 8 bits or four of 4 bits lie in a word (see formats/quantised.py): a tile of words becomes two or four tiles of
numbers, which are multiplied with as many tiles of x.

Shapes: T rows, I in, O out; a gated product has F = O, and its weight has 2F rows: gate rows first, then up rows.  J words of a
row of codes, G groups of a row.
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

AHEAD = 512  # bytes of each row that are asked of L2 before the wait


# Programs of the GPU for two words of codes in a register: each code's place in its word gives a pair of bfloat16.
# e4m3: a code's sign, and its other bits 4 places lower, are the number * 2^-120 in bfloat16.
E4M3_ASM = tl.constexpr("""{ .reg .b32 t, u, s, k; mov.b32 k, 0x7b807b80;
shl.b32 u, $2, 4; shl.b32 t, $2, 8; and.b32 s, t, 0x80008000; lop3.b32 u, u, 0x07f007f0, s, 0xea; mul.bf16x2 $0, u, k;
shr.b32 u, $2, 4; and.b32 s, $2, 0x80008000; lop3.b32 u, u, 0x07f007f0, s, 0xea; mul.bf16x2 $1, u, k; }""")
# int8: the low 7 bits under the exponent of 128, minus 128 where the code is 128 or more, else minus 256.
INT8_ASM = tl.constexpr("""{ .reg .b32 t, u, v, m, n; mov.b32 m, 0x43004300; mov.b32 n, 0x43804380;
lop3.b32 u, $2, 0x007f007f, m, 0xea; lop3.b32 v, $2, 0x00800080, n, 0x6a; sub.bf16x2 $0, u, v;
shr.b32 t, $2, 8;
lop3.b32 u, t, 0x007f007f, m, 0xea; lop3.b32 v, t, 0x00800080, n, 0x6a; sub.bf16x2 $1, u, v; }""")
# int4: a code under the exponent of 128 is 128 + code; the number is code - 8 - zero.  $5, $6: 136 + zero of the first two
# codes of a word and of the last two.
INT4_ASM = tl.constexpr("""{ .reg .b32 t, u, m; mov.b32 m, 0x43004300;
lop3.b32 u, $4, 0x000f000f, m, 0xea; sub.bf16x2 $0, u, $5;
shr.b32 t, $4, 4; lop3.b32 u, t, 0x000f000f, m, 0xea; sub.bf16x2 $1, u, $5;
shr.b32 t, $4, 8; lop3.b32 u, t, 0x000f000f, m, 0xea; sub.bf16x2 $2, u, $6;
shr.b32 t, $4, 12; lop3.b32 u, t, 0x000f000f, m, 0xea; sub.bf16x2 $3, u, $6; }""")
# e2m1: a code's sign, and its other bits 6 places lower, are the number * 2^-126 in bfloat16.
E2M1_ASM = tl.constexpr("""{ .reg .b32 t, u, s, k; mov.b32 k, 0x7e807e80;
shl.b32 u, $4, 6; shl.b32 t, $4, 12; and.b32 s, t, 0x80008000; lop3.b32 u, u, 0x01c001c0, s, 0xea; mul.bf16x2 $0, u, k;
shl.b32 u, $4, 2; shl.b32 t, $4, 8; and.b32 s, t, 0x80008000; lop3.b32 u, u, 0x01c001c0, s, 0xea; mul.bf16x2 $1, u, k;
shr.b32 u, $4, 2; shl.b32 t, $4, 4; and.b32 s, t, 0x80008000; lop3.b32 u, u, 0x01c001c0, s, 0xea; mul.bf16x2 $2, u, k;
shr.b32 u, $4, 6; and.b32 s, $4, 0x80008000; lop3.b32 u, u, 0x01c001c0, s, 0xea; mul.bf16x2 $3, u, k; }""")


@triton.jit(do_not_specialize=["T"])  # for the reason given at linear_kernel
def quantised_linear_kernel(
    x,  # [T, I]
    codes,  # words [O, J], or [2 * O, J] if GATED
    scales,  # [O, G] or [2 * O, G]
    zeros,  # as scales
    bias,  # [O] or [2 * O]
    y,  # [T, O]
    partials,  # [tiles, SPLITS, BLOCK_O, BLOCK_T] float32
    arrivals,  # [ARRIVALS] int32, zero before and after
    T, O, I, J, G, stride_x,
    KIND: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, ASM: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_O: tl.constexpr, EVEN_I: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    split = tl.program_id(1)
    r = tl.arange(0, BLOCK_O)
    out_O, row_O = rows_of_tile(tile, O, BLOCK_O, GATED)
    row_O = row_O.to(tl.int64)
    if not EVEN_O:
        row_O = tl.where(out_O < O, row_O, 0)  # an out-of-range row reads row 0; its result is not stored
    TILES: tl.constexpr = 4 if KIND == "int4" or KIND == "e2m1" else 2  # codes of a word, which belong to as many tiles
    RUN: tl.constexpr = TILES * 16
    STEP: tl.constexpr = BLOCK_I if GROUP == 0 or BLOCK_I < GROUP else max(GROUP, RUN)  # columns that are multiplied at once
    BLOCK_J: tl.constexpr = STEP // TILES
    per_split = tl.cdiv(tl.cdiv(I, BLOCK_I), SPLITS) * BLOCK_I
    low = split * per_split
    high = tl.minimum(low + per_split, I)
    codes_O = codes + row_O * J
    if PDL:
        ahead = low // TILES + tl.arange(0, AHEAD // 128) * 64
        prefetch(codes_O[:, None] + ahead[None, :], (r >= 0)[:, None] & (ahead < tl.cdiv(high, TILES))[None, :])
        tl.extra.cuda.gdc_wait()

    first_t = tl.program_id(2) * BLOCK_T
    x += first_t.to(tl.int64) * stride_x
    y += first_t.to(tl.int64) * O
    T -= first_t
    t = tl.arange(0, BLOCK_T)
    j = tl.arange(0, BLOCK_J)
    i = j // 16 * RUN + j % 16
    ok_T = t < T
    x_T = x + t * stride_x
    scales_O, zeros_O = scales + row_O * G, zeros + row_O * G
    acc_OT = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    zero_O = tl.zeros([BLOCK_O], tl.float32)
    scale_O = tl.load(scales_O + (low // GROUP if GROUP > 0 else 0))
    if HAS_ZEROS:
        zero_O = tl.load(zeros_O + (low // GROUP if GROUP > 0 else 0)).to(tl.float32)
    other_O = zero_O
    halfway = low + (high - low) // BLOCK_I // 2 * BLOCK_I
    for k in tl.range(low, high, BLOCK_I, num_stages=STAGES):
        if PDL:
            if k == halfway:
                tl.extra.cuda.gdc_launch_dependents()
        for n in tl.static_range(BLOCK_I // STEP):
            at = k + n * STEP
            at_J = at // TILES + j
            at_I = at + i
            if EVEN_I:
                c_OJ = tl.load(codes_O[:, None] + at_J[None, :])
            else:
                c_OJ = tl.load(codes_O[:, None] + at_J[None, :], mask=(at_J < J)[None, :], other=0)
            a_TJ = _columns(x_T, at_I, ok_T, high, EVEN_I)
            b_TJ = _columns(x_T, at_I + 16, ok_T, high, EVEN_I)
            if TILES == 4:
                c_TJ = _columns(x_T, at_I + 32, ok_T, high, EVEN_I)
                d_TJ = _columns(x_T, at_I + 48, ok_T, high, EVEN_I)
                if HAS_ZEROS and GROUP > 0 and GROUP < RUN:
                    other_O = tl.load(zeros_O + tl.minimum(at + GROUP, high - 1) // GROUP).to(tl.float32)
                    a_OJ, b_OJ, c_OJ, d_OJ = values_of_4_bits(c_OJ, zero_O, other_O, KIND, HAS_ZEROS, ASM, x.dtype.element_ty)
                else:
                    a_OJ, b_OJ, c_OJ, d_OJ = values_of_4_bits(c_OJ, zero_O, zero_O, KIND, HAS_ZEROS, ASM, x.dtype.element_ty)
            else:
                a_OJ, b_OJ = values_of_8_bits(c_OJ, zero_O, KIND, HAS_ZEROS, ASM, x.dtype.element_ty)
            if GROUP == 0:
                acc_OT = tl.dot(a_OJ, tl.trans(a_TJ), acc_OT, input_precision="ieee")
                acc_OT = tl.dot(b_OJ, tl.trans(b_TJ), acc_OT, input_precision="ieee")
                if TILES == 4:
                    acc_OT = tl.dot(c_OJ, tl.trans(c_TJ), acc_OT, input_precision="ieee")
                    acc_OT = tl.dot(d_OJ, tl.trans(d_TJ), acc_OT, input_precision="ieee")
            else:
                now_O = scale_O.to(tl.float32)
                ahead_g = tl.minimum(at + STEP, high - 1) // GROUP
                scale_O = tl.load(scales_O + ahead_g)
                part_OT = tl.dot(a_OJ, tl.trans(a_TJ), input_precision="ieee")
                if GROUP < 32:
                    acc_OT += part_OT * now_O[:, None]
                    now_O = _scale(scales_O, at + 16, high, GROUP)
                    part_OT = tl.dot(b_OJ, tl.trans(b_TJ), input_precision="ieee")
                else:
                    part_OT = tl.dot(b_OJ, tl.trans(b_TJ), part_OT, input_precision="ieee")
                if TILES == 4:
                    if GROUP < RUN:
                        acc_OT += part_OT * now_O[:, None]
                        now_O = _scale(scales_O, at + 32, high, GROUP)
                        part_OT = tl.dot(c_OJ, tl.trans(c_TJ), input_precision="ieee")
                    else:
                        part_OT = tl.dot(c_OJ, tl.trans(c_TJ), part_OT, input_precision="ieee")
                    if GROUP < 32:
                        acc_OT += part_OT * now_O[:, None]
                        now_O = _scale(scales_O, at + 48, high, GROUP)
                        part_OT = tl.dot(d_OJ, tl.trans(d_TJ), input_precision="ieee")
                    else:
                        part_OT = tl.dot(d_OJ, tl.trans(d_TJ), part_OT, input_precision="ieee")
                acc_OT += part_OT * now_O[:, None]
                if HAS_ZEROS:
                    zero_O = tl.load(zeros_O + ahead_g).to(tl.float32)

    if GROUP == 0:
        acc_OT *= tl.load(scales_O).to(tl.float32)[:, None]
    complete(acc_OT, bias, y, partials, arrivals, tile, split, T, O, BLOCK_T, BLOCK_O, SPLITS, GATED, HAS_BIAS)


@triton.jit
def _columns(x_T, at_I, ok_T, high, EVEN_I: tl.constexpr):
    """These columns of x, [T, J]."""
    ok_TJ = ok_T[:, None] if EVEN_I else ok_T[:, None] & (at_I < high)[None, :]
    return tl.load(x_T[:, None] + at_I[None, :], mask=ok_TJ, other=0.0)


@triton.jit
def _scale(scales_O, column, high, GROUP: tl.constexpr):
    """The scales of a column's group; of a column that is not there, any."""
    return tl.load(scales_O + tl.minimum(column, high - 1) // GROUP).to(tl.float32)


@triton.jit
def values_of_8_bits(c_OJ, zero_O, KIND: tl.constexpr, HAS_ZEROS: tl.constexpr, ASM: tl.constexpr, DTYPE: tl.constexpr):
    """Words of two codes of 8 bits as two tiles of numbers.  ASM: to bfloat16, two words at a time."""
    if ASM:
        PROGRAM: tl.constexpr = E4M3_ASM if KIND == "e4m3" else INT8_ASM
        a_OJ, b_OJ = tl.inline_asm_elementwise(
            PROGRAM, "=r,=r,r", [c_OJ], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        a_OJ, b_OJ = value_of_8_bits(c_OJ, KIND, DTYPE), value_of_8_bits(c_OJ >> 8, KIND, DTYPE)
    if HAS_ZEROS:
        a_OJ, b_OJ = a_OJ - zero_O.to(DTYPE)[:, None], b_OJ - zero_O.to(DTYPE)[:, None]
    return a_OJ, b_OJ


@triton.jit
def value_of_8_bits(word_OJ, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """The number of the code in the lowest 8 bits."""
    code_OJ = word_OJ.to(tl.int32)
    if KIND == "e4m3":
        bits_OJ = ((code_OJ & 0x80) << 24) | ((code_OJ & 0x7F) << 20)
        return (bits_OJ.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(DTYPE)  # 2^120
    return ((code_OJ & 0xFF) - 128).to(tl.float32).to(DTYPE)


@triton.jit
def values_of_4_bits(
    c_OJ, zero_O, other_O, KIND: tl.constexpr, HAS_ZEROS: tl.constexpr, ASM: tl.constexpr, DTYPE: tl.constexpr
):
    """Words of four codes of 4 bits as four tiles of numbers.  ASM: to bfloat16, two words at a time.

    zero_O, other_O: the zeros of the first two tiles and of the last two.
    """
    if ASM:
        if KIND == "e2m1":
            a_OJ, b_OJ, c_OJ, d_OJ = tl.inline_asm_elementwise(
                E2M1_ASM, "=r,=r,=r,=r,r", [c_OJ], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True,
                pack=2,
            )  # fmt: skip
        else:  # 136 + zero is from 128 to 143, which bfloat16 holds
            zero_OJ = tl.broadcast_to((zero_O + 136).to(tl.bfloat16)[:, None], c_OJ.shape)
            other_OJ = tl.broadcast_to((other_O + 136).to(tl.bfloat16)[:, None], c_OJ.shape)
            a_OJ, b_OJ, c_OJ, d_OJ = tl.inline_asm_elementwise(
                INT4_ASM, "=r,=r,=r,=r,r,r,r", [c_OJ, zero_OJ, other_OJ],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
            )  # fmt: skip
    else:
        a_OJ, b_OJ = value_of_4_bits(c_OJ, zero_O, KIND, DTYPE), value_of_4_bits(c_OJ >> 4, zero_O, KIND, DTYPE)
        c_OJ, d_OJ = value_of_4_bits(c_OJ >> 8, other_O, KIND, DTYPE), value_of_4_bits(c_OJ >> 12, other_O, KIND, DTYPE)
    return a_OJ, b_OJ, c_OJ, d_OJ


@triton.jit
def value_of_4_bits(word_OJ, zero_O, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """The number of the code in the lowest 4 bits."""
    code_OJ = word_OJ.to(tl.int32)
    if KIND == "e2m1":
        bits_OJ = ((code_OJ & 8) << 28) | ((code_OJ & 7) << 22)
        return (bits_OJ.to(tl.float32, bitcast=True) * 8.507059173023462e37).to(DTYPE)  # 2^126
    return (((code_OJ & 15) - 8).to(tl.float32) - zero_O[:, None]).to(DTYPE)


def launch_quantised_linear(
    x_TI: Tensor, weight: QuantisedMatrix, bias_O: Tensor | None, gated: bool, tiles: QuantisedTiles
) -> Tensor:
    """[T, O], or [T, F] if gated.  The rows of x may be strided; a split product has at most tiles.block_m of them.

    What launch_linear says of split products holds here too.
    """
    (T, I), rows = x_TI.shape, weight.qweight_NJ.shape[0]
    O = rows // 2 if gated else rows
    assert 0 < T and (T <= tiles.block_m or tiles.splits == 1) and weight.columns == I and x_TI.stride(1) == 1
    assert bias_O is None or bias_O.shape == (rows,)
    outs = tiles.block_n // 2 if gated else tiles.block_n
    num_tiles = triton.cdiv(O, outs)
    y_TO, partials, arrivals = result_of(x_TI, O, tiles.splits, num_tiles, tiles.block_n, tiles.block_m)
    scales_NG, zero_points_NG = weight.scales_NG, weight.scales_NG if weight.zero_points_NG is None else weight.zero_points_NG
    quantised_linear_kernel[(num_tiles, tiles.splits, triton.cdiv(T, tiles.block_m))](
        x_TI, weight.qweight_NJ.view(torch.int16), scales_NG, zero_points_NG, scales_NG if bias_O is None else bias_O, y_TO,
        partials, arrivals, T, O, I, weight.qweight_NJ.shape[1] // 2, scales_NG.shape[1], x_TI.stride(0),
        KIND=weight.kind, GROUP=weight.group, HAS_ZEROS=weight.zero_points_NG is not None,
        ASM=x_TI.dtype == torch.bfloat16 and x_TI.is_cuda,
        BLOCK_T=tiles.block_m, BLOCK_O=tiles.block_n, BLOCK_I=tiles.block_k, SPLITS=tiles.splits, STAGES=tiles.stages,
        GATED=gated, HAS_BIAS=bias_O is not None, EVEN_O=O % outs == 0, EVEN_I=I % tiles.block_k == 0, AHEAD=AHEAD,
        num_warps=tiles.warps, num_stages=tiles.stages, **chained(x_TI.device),
    )  # fmt: skip
    return y_TO
