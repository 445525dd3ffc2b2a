"""How the kernel of kernels/experts/mixture_triton.py makes numbers of words of codes, in registers.

On a GPU in bfloat16 a float's code is moved to where bfloat16 has its sign, exponent and mantissa, and nothing else: the
result is the number times a small power of two, SMALL.  x is multiplied by LARGE, so that products stay in float32's range,
and sums are divided by both at their end.  All of it is exact, for x below 2^63.  Integers, and floats elsewhere, become the
numbers themselves.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.ops.products.kernels.quantised.stream_triton import value_of_8_bits, values_of_4_bits, values_of_8_bits

LARGE = tl.constexpr(2.0**64)
# Programs of the GPU for two words of codes in a register.  e4m3: the number * 2^-120.
E4M3_ASM = tl.constexpr("""{ .reg .b32 t, u, s;
shl.b32 u, $2, 4; shl.b32 t, $2, 8; and.b32 s, t, 0x80008000; lop3.b32 $0, u, 0x07f007f0, s, 0xea;
shr.b32 u, $2, 4; and.b32 s, $2, 0x80008000; lop3.b32 $1, u, 0x07f007f0, s, 0xea; }""")
# e2m1: the number * 2^-126.  `pack_steps` has put the first code's bits where they belong, and the others' near them.
E2M1_ASM = tl.constexpr("""{ .reg .b32 t, u, v;
and.b32 $0, $4, 0x81c081c0; shl.b32 t, $4, 3; and.b32 $1, t, 0x81c081c0; shl.b32 t, $4, 6; and.b32 $2, t, 0x81c081c0;
shl.b32 t, $4, 1; shr.b32 u, $4, 5; shr.b32 v, $4, 4; and.b32 t, t, 0x80008000;
lop3.b32 t, u, 0x01000100, t, 0xea; lop3.b32 $3, v, 0x00c000c0, t, 0xea; }""")
ENLARGE_ASM = tl.constexpr("{ .reg .b32 k; mov.b32 k, 0x5f805f80; mul.bf16x2 $0, $1, k; }")  # times 2^64


@triton.jit
def convert_4(c_OJ, KIND: tl.constexpr, ASM: tl.constexpr, DTYPE: tl.constexpr):
    """Words of four codes of 4 bits as four tiles of numbers."""
    if KIND == "e2m1":
        if ASM:
            a_OJ, b_OJ, c_OJ, d_OJ = tl.inline_asm_elementwise(
                E2M1_ASM, "=r,=r,=r,=r,r", [c_OJ], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True,
                pack=2,
            )  # fmt: skip
        else:
            word_OJ = c_OJ.to(tl.int32)
            a_OJ, b_OJ = _number(word_OJ, DTYPE), _number(word_OJ << 3, DTYPE)
            fourth_OJ = (word_OJ << 1 & 0x8000) | (word_OJ >> 5 & 0x100) | (word_OJ >> 4 & 0xC0)
            c_OJ, d_OJ = _number(word_OJ << 6, DTYPE), _number(fourth_OJ, DTYPE)
    else:
        none_O = tl.zeros([c_OJ.shape[0]], tl.float32)
        a_OJ, b_OJ, c_OJ, d_OJ = values_of_4_bits(c_OJ, none_O, none_O, KIND, False, ASM, DTYPE)
    return a_OJ, b_OJ, c_OJ, d_OJ


@triton.jit
def convert_8(c_OJ, KIND: tl.constexpr, ASM: tl.constexpr, DTYPE: tl.constexpr):
    """Words of two codes of 8 bits as two tiles of numbers."""
    if KIND == "e4m3" and ASM:
        a_OJ, b_OJ = tl.inline_asm_elementwise(
            E4M3_ASM, "=r,=r,r", [c_OJ], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    elif KIND == "e4m3":
        a_OJ, b_OJ = value_of_8_bits(c_OJ, KIND, DTYPE), value_of_8_bits(c_OJ >> 8, KIND, DTYPE)
    else:
        a_OJ, b_OJ = values_of_8_bits(c_OJ, tl.zeros([c_OJ.shape[0]], tl.float32), KIND, False, ASM, DTYPE)
    return a_OJ, b_OJ


@triton.jit
def _number(word_OJ, DTYPE: tl.constexpr):
    """The number of the code whose sign is bit 15 and whose other bits are 8, 7 and 6."""
    bits_OJ = ((word_OJ & 0x8000) | (word_OJ & 0x1C0)) << 16
    return (bits_OJ.to(tl.float32, bitcast=True) * 8.507059173023462e37).to(DTYPE)  # 2^126


@triton.jit
def enlarged(x_TJ):
    """x, in bfloat16, times LARGE."""
    return tl.inline_asm_elementwise(ENLARGE_ASM, "=r,r", [x_TJ], dtype=tl.bfloat16, is_pure=True, pack=2)
