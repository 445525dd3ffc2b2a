"""The kernel that computes a weight's numbers from its codes, for products of many rows, which a library multiplies.

Shapes: O rows, I columns, J words of a row's codes, G groups of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.quantised.codes import TILE, codes_a_word
from specdec.ops.quantised.linear_triton import _convert_4, _convert_8

if TYPE_CHECKING:
    from specdec.ops.quantised.codes import Codes

WORDS = 4096  # of a program


@triton.jit
def dequantise_kernel(
    codes,  # words [O, J]
    scales,  # [O, G]
    zeros,  # as scales
    out,  # [O, I]
    O, I, J, G,
    KIND: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, ONE: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    row_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    j = tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)
    ok_O = row_O < O
    row_O = row_O.to(tl.int64)
    c_OJ = tl.load(codes + row_O[:, None] * J + j[None, :], mask=ok_O[:, None] & (j < J)[None, :], other=0)
    none_O = tl.zeros([BLOCK_O], tl.float32)
    scales_O, zeros_O, out_O = scales + row_O * G, zeros + row_O * G, out + row_O * I
    if KIND == "int4" or KIND == "e2m1":
        a_OJ, b_OJ, c_OJ, d_OJ = _convert_4(c_OJ, none_O, none_O, KIND, False, False, tl.float32)
        i = j // 16 * 64 + j % 16
        _store(c_OJ, i + 32, scales_O, zeros_O, out_O, ok_O, I, GROUP, HAS_ZEROS, ONE)
        _store(d_OJ, i + 48, scales_O, zeros_O, out_O, ok_O, I, GROUP, HAS_ZEROS, ONE)
    else:
        a_OJ, b_OJ = _convert_8(c_OJ, none_O, KIND, False, False, tl.float32)
        i = j // 16 * 32 + j % 16
    _store(a_OJ, i, scales_O, zeros_O, out_O, ok_O, I, GROUP, HAS_ZEROS, ONE)
    _store(b_OJ, i + 16, scales_O, zeros_O, out_O, ok_O, I, GROUP, HAS_ZEROS, ONE)


@triton.jit
def _store(w_OJ, i, scales_O, zeros_O, out_O, ok_O, I, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, ONE: tl.constexpr):
    """The numbers of these columns, rounded once."""
    ok_OJ = ok_O[:, None] & (i < I)[None, :]
    if ONE:  # all columns of the block have one scale a row
        g = tl.min(i, 0) // GROUP if GROUP > 0 else 0
        if HAS_ZEROS:
            w_OJ -= tl.load(zeros_O + g, mask=ok_O, other=0).to(tl.float32)[:, None]
        w_OJ *= tl.load(scales_O + g, mask=ok_O, other=0.0).to(tl.float32)[:, None]
    else:
        g_J = i // GROUP
        if HAS_ZEROS:
            w_OJ -= tl.load(zeros_O[:, None] + g_J[None, :], mask=ok_OJ, other=0).to(tl.float32)
        w_OJ *= tl.load(scales_O[:, None] + g_J[None, :], mask=ok_OJ, other=0.0).to(tl.float32)
    tl.store(out_O[:, None] + i[None, :], w_OJ.to(out_O.dtype.element_ty), mask=ok_OJ)


def launch_dequantise(weight: Codes, dtype: torch.dtype) -> Tensor:
    """[O, I], contiguous."""
    words_OJ = weight.codes_OJ.view(torch.int16)
    O, J = words_OJ.shape
    out_OI = torch.empty(O, weight.columns, dtype=dtype, device=weight.codes_OJ.device)
    assert weight.scales_OG.dtype != torch.float64
    of_group = weight.group // codes_a_word(weight.kind) if weight.group else 256
    one = of_group >= TILE  # else several groups' columns lie in the same words
    block_j = min(256, of_group) if one else 256
    block_o = WORDS // block_j
    dequantise_kernel[(triton.cdiv(O, block_o), triton.cdiv(J, block_j))](
        words_OJ, weight.scales_OG, weight.scales_OG if weight.zeros_OG is None else weight.zeros_OG, out_OI,
        O, weight.columns, J, weight.scales_OG.shape[1], KIND=weight.kind, GROUP=weight.group,
        HAS_ZEROS=weight.zeros_OG is not None, ONE=one, BLOCK_O=block_o, BLOCK_J=block_j,
    )  # fmt: skip
    return out_OI
