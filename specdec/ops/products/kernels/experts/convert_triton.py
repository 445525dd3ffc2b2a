"""How the kernel of kernels/experts/mixture_triton.py converts words of quantised values in registers.

On a GPU in bfloat16 a float's bits are moved to where bfloat16 has its sign, exponent and mantissa, and nothing else: the
result is the value times a small power of two, SMALL.  x is multiplied by LARGE, so that products stay in float32's range,
and sums are divided by both at their end.  All of it is exact, for x below 2^63.  Integers, and floats elsewhere, become the
unscaled values themselves.
"""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.ops.products.kernels.quantised.stream_triton import value_of_8_bits, values_of_4_bits, values_of_8_bits

LARGE = tl.constexpr(2.0**64)
# PTX for two words of quantised values in a register.  e4m3: the value * 2^-120.
E4M3_ASM = tl.constexpr("""{ .reg .b32 t, u, s;
shl.b32 u, $2, 4; shl.b32 t, $2, 8; and.b32 s, t, 0x80008000; lop3.b32 $0, u, 0x07f007f0, s, 0xea;
shr.b32 u, $2, 4; and.b32 s, $2, 0x80008000; lop3.b32 $1, u, 0x07f007f0, s, 0xea; }""")
# e2m1: the value * 2^-126.  `pack_steps` has put the first value's bits where they belong, and the others' near them.
E2M1_ASM = tl.constexpr("""{ .reg .b32 t, u, v;
and.b32 $0, $4, 0x81c081c0; shl.b32 t, $4, 3; and.b32 $1, t, 0x81c081c0; shl.b32 t, $4, 6; and.b32 $2, t, 0x81c081c0;
shl.b32 t, $4, 1; shr.b32 u, $4, 5; shr.b32 v, $4, 4; and.b32 t, t, 0x80008000;
lop3.b32 t, u, 0x01000100, t, 0xea; lop3.b32 $3, v, 0x00c000c0, t, 0xea; }""")
ENLARGE_ASM = tl.constexpr("{ .reg .b32 k; mov.b32 k, 0x5f805f80; mul.bf16x2 $0, $1, k; }")  # times 2^64


@triton.jit
def convert_4(words_NJ, KIND: tl.constexpr, ASM: tl.constexpr, DTYPE: tl.constexpr):
    """Words of four values of 4 bits as four tiles of unscaled values."""
    if KIND == "e2m1":
        if ASM:
            a_NJ, b_NJ, c_NJ, d_NJ = tl.inline_asm_elementwise(
                E2M1_ASM, "=r,=r,=r,=r,r", [words_NJ], dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True,
                pack=2,
            )  # fmt: skip
        else:
            word_NJ = words_NJ.to(tl.int32)
            a_NJ, b_NJ = _value(word_NJ, DTYPE), _value(word_NJ << 3, DTYPE)
            fourth_NJ = (word_NJ << 1 & 0x8000) | (word_NJ >> 5 & 0x100) | (word_NJ >> 4 & 0xC0)
            c_NJ, d_NJ = _value(word_NJ << 6, DTYPE), _value(fourth_NJ, DTYPE)
    else:
        none_N = _zeros_of_rows(words_NJ)
        a_NJ, b_NJ, c_NJ, d_NJ = values_of_4_bits(words_NJ, none_N, none_N, KIND, False, ASM, DTYPE)
    return a_NJ, b_NJ, c_NJ, d_NJ


@triton.jit
def convert_8(words_NJ, KIND: tl.constexpr, ASM: tl.constexpr, DTYPE: tl.constexpr):
    """Words of two values of 8 bits as two tiles of unscaled values."""
    if KIND == "e4m3" and ASM:
        a_NJ, b_NJ = tl.inline_asm_elementwise(
            E4M3_ASM, "=r,=r,r", [words_NJ], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    elif KIND == "e4m3":
        a_NJ, b_NJ = value_of_8_bits(words_NJ, KIND, DTYPE), value_of_8_bits(words_NJ >> 8, KIND, DTYPE)
    else:
        a_NJ, b_NJ = values_of_8_bits(words_NJ, _zeros_of_rows(words_NJ), KIND, False, ASM, DTYPE)
    return a_NJ, b_NJ


@triton.jit
def _zeros_of_rows(words_NJ):
    """[N], or [S, N] of words [S, N, J]."""
    if len(words_NJ.shape) == 2:
        zeros_N = tl.zeros([words_NJ.shape[0]], tl.float32)
    else:
        zeros_N = tl.zeros([words_NJ.shape[0], words_NJ.shape[1]], tl.float32)
    return zeros_N


@triton.jit
def _value(word_NJ, DTYPE: tl.constexpr):
    """The unscaled value whose sign is bit 15 and whose other bits are 8, 7 and 6."""
    bits_NJ = ((word_NJ & 0x8000) | (word_NJ & 0x1C0)) << 16
    return (bits_NJ.to(tl.float32, bitcast=True) * 8.507059173023462e37).to(DTYPE)  # 2^126


@triton.jit
def enlarged(x_MJ):
    """x, in bfloat16, times LARGE."""
    return tl.inline_asm_elementwise(ENLARGE_ASM, "=r,r", [x_MJ], dtype=tl.bfloat16, is_pure=True, pack=2)
