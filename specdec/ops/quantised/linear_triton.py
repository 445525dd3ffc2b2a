"""The kernel of a product with few rows and a weight of 8 or 4 bits, which streams the weight once.

It is ops/products/linear_triton.py's kernel, whose docstring explains tiles, splits and chained launches, over codes instead of
numbers.  A tile of codes is converted in registers to x's dtype, in which every code is exact, and multiplied; scales multiply
float32 sums.  So nothing is rounded before the end.

- A scale for each row is applied once, to the complete sum.
- A scale for each group of columns is applied to the sum over that group: a step is one group, or a part of one.  It is read a
  step ahead, because the loop's pipeline holds only what is multiplied.

Two codes of 4 bits lie in a byte (see codes.py): a tile of bytes becomes two tiles of numbers, for two tiles of x.

Shapes: T rows, I in, O out; a gated product has F = O, and its weight has 2F rows: gate rows first, then up rows.  J bytes of a
row of codes, G groups of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.products.linear_triton import ARRIVALS, _arrivals, _finish, _prefetch

if TYPE_CHECKING:
    from specdec.ops.products.tiles import ProductTiles
    from specdec.ops.quantised.codes import Codes

AHEAD = 512  # bytes of each row that are asked of L2 before the wait


# Programs of the GPU for four bytes in a register: their codes become pairs of bfloat16.  A byte's place does not matter.
# e4m3: a code's sign, and its other bits 4 places lower, are the number * 2^-120 in bfloat16.
E4M3_ASM = tl.constexpr("""{ .reg .b32 t, u, s, k; mov.b32 k, 0x7b807b80;
prmt.b32 t, $2, 0, 0x1404; shr.b32 u, t, 4; and.b32 s, t, 0x80008000; lop3.b32 u, u, 0x07f007f0, s, 0xea; mul.bf16x2 $0, u, k;
prmt.b32 t, $2, 0, 0x3424; shr.b32 u, t, 4; and.b32 s, t, 0x80008000; lop3.b32 u, u, 0x07f007f0, s, 0xea; mul.bf16x2 $1, u, k;
}""")
# int8: the low 7 bits under the exponent of 128, minus 128 where the code is 128 or more, else minus 256.
INT8_ASM = tl.constexpr("""{ .reg .b32 t, u, v;
prmt.b32 t, $2, 0, 0x4140; and.b32 u, t, 0x007f007f; or.b32 u, u, 0x43004300;
and.b32 v, t, 0x00800080; xor.b32 v, v, 0x43804380; sub.bf16x2 $0, u, v;
prmt.b32 t, $2, 0, 0x4342; and.b32 u, t, 0x007f007f; or.b32 u, u, 0x43004300;
and.b32 v, t, 0x00800080; xor.b32 v, v, 0x43804380; sub.bf16x2 $1, u, v; }""")
# int4: a nibble under the exponent of 128 is 128 + code; the number is code - 8.
INT4_ASM = tl.constexpr("""{ .reg .b32 t, u, k, m; mov.b32 k, 0x43084308; mov.b32 m, 0x43004300;
prmt.b32 t, $4, 0, 0x4140; lop3.b32 u, t, 0x000f000f, m, 0xea; sub.bf16x2 $0, u, k;
shr.b32 t, t, 4; lop3.b32 u, t, 0x000f000f, m, 0xea; sub.bf16x2 $2, u, k;
prmt.b32 t, $4, 0, 0x4342; lop3.b32 u, t, 0x000f000f, m, 0xea; sub.bf16x2 $1, u, k;
shr.b32 t, t, 4; lop3.b32 u, t, 0x000f000f, m, 0xea; sub.bf16x2 $3, u, k; }""")
INT4_ZEROS_ASM = tl.constexpr("""{ .reg .b32 t, u, m; mov.b32 m, 0x43004300;
prmt.b32 t, $4, 0, 0x4140; lop3.b32 u, t, 0x000f000f, m, 0xea; sub.bf16x2 $0, u, $5;
shr.b32 t, t, 4; lop3.b32 u, t, 0x000f000f, m, 0xea; sub.bf16x2 $2, u, $5;
prmt.b32 t, $4, 0, 0x4342; lop3.b32 u, t, 0x000f000f, m, 0xea; sub.bf16x2 $1, u, $6;
shr.b32 t, t, 4; lop3.b32 u, t, 0x000f000f, m, 0xea; sub.bf16x2 $3, u, $6; }""")
# e2m1: a nibble's sign, and its other bits 6 places lower, are the number * 2^-126 in bfloat16.
E2M1_ASM = tl.constexpr("""{ .reg .b32 t, u, s, k; mov.b32 k, 0x7e807e80;
prmt.b32 t, $4, 0, 0x1404;
shr.b32 u, t, 6; and.b32 s, t, 0x80008000; lop3.b32 u, u, 0x01c001c0, s, 0xea; mul.bf16x2 $2, u, k;
shl.b32 t, t, 4; shr.b32 u, t, 6; and.b32 s, t, 0x80008000; lop3.b32 u, u, 0x01c001c0, s, 0xea; mul.bf16x2 $0, u, k;
prmt.b32 t, $4, 0, 0x3424;
shr.b32 u, t, 6; and.b32 s, t, 0x80008000; lop3.b32 u, u, 0x01c001c0, s, 0xea; mul.bf16x2 $3, u, k;
shl.b32 t, t, 4; shr.b32 u, t, 6; and.b32 s, t, 0x80008000; lop3.b32 u, u, 0x01c001c0, s, 0xea; mul.bf16x2 $1, u, k; }""")


@triton.jit(do_not_specialize=["T"])  # for the reason given at linear_kernel
def quantised_linear_kernel(
    x,  # [T, I]
    codes,  # [O, J], or [2 * O, J] if GATED
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
    if GATED:  # the tile's first half holds gate rows, its second half the up rows that belong to them
        out_O = tile * (BLOCK_O // 2) + r % (BLOCK_O // 2)
        row_O = (out_O + r // (BLOCK_O // 2) * O).to(tl.int64)
    else:
        out_O = tile * BLOCK_O + r
        row_O = out_O.to(tl.int64)
    if not EVEN_O:
        row_O = tl.where(out_O < O, row_O, 0)  # an out-of-range row reads row 0; its result is not stored
    HALVES: tl.constexpr = 2 if KIND == "int4" or KIND == "e2m1" else 1  # codes in a byte
    STEP: tl.constexpr = BLOCK_I if GROUP == 0 or BLOCK_I < GROUP else max(GROUP, 32)  # columns that are multiplied at once
    BLOCK_J: tl.constexpr = STEP // HALVES
    per_split = tl.cdiv(tl.cdiv(I, BLOCK_I), SPLITS) * BLOCK_I
    low = split * per_split
    high = tl.minimum(low + per_split, I)
    codes_O = codes + row_O * J
    if PDL:
        ahead = low // HALVES + tl.arange(0, AHEAD // 128) * 128
        _prefetch(codes_O[:, None] + ahead[None, :], (r >= 0)[:, None] & (ahead < tl.cdiv(high, HALVES))[None, :])
        tl.extra.cuda.gdc_wait()

    first_t = tl.program_id(2) * BLOCK_T
    x += first_t.to(tl.int64) * stride_x
    y += first_t.to(tl.int64) * O
    T -= first_t
    t = tl.arange(0, BLOCK_T)
    j = tl.arange(0, BLOCK_J)
    i = j if HALVES == 1 else j // 16 * 32 + j % 16
    ok_T = t < T
    x_T = x + t * stride_x
    scales_O, zeros_O = scales + row_O * G, zeros + row_O * G
    acc_OT = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
    if GROUP > 0:
        scale_O = tl.load(scales_O + low // GROUP)
        if GROUP < 32:
            other_O = tl.load(scales_O + low // GROUP + 1)
    zero_O = scale_O if GROUP > 0 else tl.zeros([BLOCK_O], tl.float32)
    if HAS_ZEROS:
        zero_O = tl.load(zeros_O + (low // GROUP if GROUP > 0 else 0))
    halfway = low + (high - low) // BLOCK_I // 2 * BLOCK_I
    for k in tl.range(low, high, BLOCK_I, num_stages=STAGES):
        if PDL:
            if k == halfway:
                tl.extra.cuda.gdc_launch_dependents()
        for n in tl.static_range(BLOCK_I // STEP):
            at = k + n * STEP
            at_J = at // HALVES + j
            at_I = at + i
            if EVEN_I:
                c_OJ = tl.load(codes_O[:, None] + at_J[None, :])
                x_TJ = tl.load(x_T[:, None] + at_I[None, :], mask=ok_T[:, None], other=0.0)
            else:
                c_OJ = tl.load(codes_O[:, None] + at_J[None, :], mask=(at_J < J)[None, :], other=0)
                x_TJ = tl.load(x_T[:, None] + at_I[None, :], mask=ok_T[:, None] & (at_I < high)[None, :], other=0.0)
            if HALVES == 2:
                if EVEN_I:
                    next_TJ = tl.load(x_T[:, None] + at_I[None, :] + 16, mask=ok_T[:, None], other=0.0)
                else:
                    ok_I = at_I + 16 < high
                    next_TJ = tl.load(x_T[:, None] + at_I[None, :] + 16, mask=ok_T[:, None] & ok_I[None, :], other=0.0)
                w_OJ, next_OJ = _convert_4(c_OJ, zero_O, KIND, HAS_ZEROS, ASM, x.dtype.element_ty)
            else:
                w_OJ = _convert_8(c_OJ, zero_O, KIND, HAS_ZEROS, ASM, x.dtype.element_ty)
            if GROUP == 0:
                acc_OT = tl.dot(w_OJ, tl.trans(x_TJ), acc_OT, input_precision="ieee")
                if HALVES == 2:
                    acc_OT = tl.dot(next_OJ, tl.trans(next_TJ), acc_OT, input_precision="ieee")
            else:
                now_O = scale_O.to(tl.float32)
                ahead_g = tl.minimum(at + STEP, high - 1) // GROUP
                scale_O = tl.load(scales_O + ahead_g)
                part_OT = tl.dot(w_OJ, tl.trans(x_TJ), input_precision="ieee")
                if GROUP < 32:  # each of the two tiles is a group
                    acc_OT += part_OT * now_O[:, None]
                    now_O = other_O.to(tl.float32)
                    other_O = tl.load(scales_O + tl.minimum(at + STEP + GROUP, high - 1) // GROUP)
                    part_OT = tl.dot(next_OJ, tl.trans(next_TJ), input_precision="ieee")
                elif HALVES == 2:
                    part_OT = tl.dot(next_OJ, tl.trans(next_TJ), part_OT, input_precision="ieee")
                acc_OT += part_OT * now_O[:, None]
                if HAS_ZEROS:
                    zero_O = tl.load(zeros_O + ahead_g)

    if GROUP == 0:
        acc_OT *= tl.load(scales_O).to(tl.float32)[:, None]
    if SPLITS == 1:
        _finish(acc_OT, bias, y, T, O, BLOCK_T, BLOCK_O, GATED, HAS_BIAS)
    else:  # the program of this tile that arrives last sums all partial results, in a fixed order
        SIZE: tl.constexpr = BLOCK_O * BLOCK_T
        cell_OT = r[:, None] * BLOCK_T + t[None, :]
        mine = partials + tile * (SPLITS * SIZE)
        tl.store(mine + split * SIZE + cell_OT, acc_OT)
        tl.debug_barrier()  # all of this program's stores before its arrival
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLITS - 1:
            tl.store(arrivals + tile, 0)
            acc_OT = tl.zeros([BLOCK_O, BLOCK_T], tl.float32)
            for s in tl.static_range(SPLITS):
                acc_OT += tl.load(mine + s * SIZE + cell_OT, cache_modifier=".cg")  # from L2, as linear_kernel does
            _finish(acc_OT, bias, y, T, O, BLOCK_T, BLOCK_O, GATED, HAS_BIAS)


@triton.jit
def _convert_8(c_OJ, zero_O, KIND: tl.constexpr, HAS_ZEROS: tl.constexpr, ASM: tl.constexpr, DTYPE: tl.constexpr):
    """Codes of 8 bits as numbers.  ASM: to bfloat16, four at a time."""
    if ASM:
        PROGRAM: tl.constexpr = E4M3_ASM if KIND == "e4m3" else INT8_ASM
        w_OJ = tl.inline_asm_elementwise(PROGRAM, "=r,=r,r", [c_OJ], dtype=tl.bfloat16, is_pure=True, pack=4)
    elif KIND == "e4m3":
        bits_OJ = c_OJ.to(tl.int32)
        bits_OJ = ((bits_OJ & 0x80) << 24) | ((bits_OJ & 0x7F) << 20)
        w_OJ = (bits_OJ.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(DTYPE)  # 2^120
    else:
        w_OJ = (c_OJ.to(tl.float32) - 128).to(DTYPE)
    if HAS_ZEROS:
        w_OJ = w_OJ - zero_O.to(DTYPE)[:, None]
    return w_OJ


@triton.jit
def _convert_4(c_OJ, zero_O, KIND: tl.constexpr, HAS_ZEROS: tl.constexpr, ASM: tl.constexpr, DTYPE: tl.constexpr):
    """Bytes of two codes as two tiles of numbers.  ASM: to bfloat16, four bytes at a time."""
    if ASM:
        if KIND == "e2m1":
            first_OJ, second_OJ = tl.inline_asm_elementwise(
                E2M1_ASM, "=r,=r,=r,=r,r", [c_OJ], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        elif HAS_ZEROS:  # numbers beyond 8 bits would be rounded; 136 + zero is at most 144
            zero_OJ = tl.broadcast_to((zero_O.to(tl.float32) + 136).to(tl.bfloat16)[:, None], c_OJ.shape)
            first_OJ, second_OJ = tl.inline_asm_elementwise(
                INT4_ZEROS_ASM, "=r,=r,=r,=r,r,r,r", [c_OJ, zero_OJ], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        else:
            first_OJ, second_OJ = tl.inline_asm_elementwise(
                INT4_ASM, "=r,=r,=r,=r,r", [c_OJ], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
    else:
        first_OJ = _nibbles(c_OJ & 15, zero_O, KIND, HAS_ZEROS, DTYPE)
        second_OJ = _nibbles(c_OJ >> 4, zero_O, KIND, HAS_ZEROS, DTYPE)
    return first_OJ, second_OJ


@triton.jit
def _nibbles(code_OJ, zero_O, KIND: tl.constexpr, HAS_ZEROS: tl.constexpr, DTYPE: tl.constexpr):
    """Codes of 4 bits as numbers."""
    code_OJ = code_OJ.to(tl.int32)
    if KIND == "e2m1":
        bits_OJ = ((code_OJ & 8) << 28) | ((code_OJ & 7) << 22)
        return (bits_OJ.to(tl.float32, bitcast=True) * 8.507059173023462e37).to(DTYPE)  # 2^126
    w_OJ = (code_OJ - 8).to(tl.float32)
    if HAS_ZEROS:
        w_OJ -= zero_O.to(tl.float32)[:, None]
    return w_OJ.to(DTYPE)


def launch_quantised_linear(x_TI: Tensor, weight: Codes, bias_O: Tensor | None, gated: bool, tiles: ProductTiles) -> Tensor:
    """[T, O], or [T, F] if gated.  The rows of x may be strided; a split product has at most tiles.block_t of them.

    What launch_linear says of split products holds here too.
    """
    (T, I), rows = x_TI.shape, weight.codes_OJ.shape[0]
    O = rows // 2 if gated else rows
    assert 0 < T and (T <= tiles.block_t or tiles.splits == 1) and weight.columns == I and x_TI.stride(1) == 1
    assert bias_O is None or bias_O.shape == (rows,)
    outs = tiles.block_o // 2 if gated else tiles.block_o
    num_tiles = triton.cdiv(O, outs)
    y_TO = x_TI.new_empty(T, O)
    partials = arrivals = y_TO
    if tiles.splits > 1:
        assert num_tiles <= ARRIVALS
        partials = x_TI.new_empty(num_tiles, tiles.splits, tiles.block_o, tiles.block_t, dtype=torch.float32)
        arrivals = _arrivals(x_TI.device)
    quantised_linear_kernel[(num_tiles, tiles.splits, triton.cdiv(T, tiles.block_t))](
        x_TI, weight.codes_OJ, weight.scales_OG, weight.scales_OG if weight.zeros_OG is None else weight.zeros_OG,
        weight.scales_OG if bias_O is None else bias_O, y_TO, partials, arrivals,
        T, O, I, weight.codes_OJ.shape[1], weight.scales_OG.shape[1], x_TI.stride(0),
        KIND=weight.kind, GROUP=weight.group, HAS_ZEROS=weight.zeros_OG is not None,
        ASM=x_TI.dtype == torch.bfloat16 and x_TI.is_cuda,
        BLOCK_T=tiles.block_t, BLOCK_O=tiles.block_o, BLOCK_I=tiles.block_i, SPLITS=tiles.splits, STAGES=tiles.stages,
        GATED=gated, HAS_BIAS=bias_O is not None, EVEN_O=O % outs == 0, EVEN_I=I % tiles.block_i == 0, AHEAD=AHEAD,
        num_warps=tiles.warps, num_stages=tiles.stages, **chained(x_TI.device),
    )  # fmt: skip
    return y_TO
