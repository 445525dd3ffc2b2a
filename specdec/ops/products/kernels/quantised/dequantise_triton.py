"""The kernel that computes a weight's numbers from its codes, for products of many rows, which a library multiplies.

Shapes: O rows, I columns, J words of a row's codes, G groups of a row, R runs of 16 words, w words of a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.products.formats.quantised import TILE, pack_factor_of
from specdec.ops.products.kernels.quantised.stream_triton import values_of_4_bits, values_of_8_bits

if TYPE_CHECKING:
    from specdec.ops.products.formats.quantised import QuantisedMatrix

NUMBERS, COLUMNS = 4096, 512  # of a program


@triton.jit
def dequantise_kernel(
    codes,  # words [O, J]
    scales,  # [O, G]
    zeros,  # as scales
    out,  # [O, I]
    O, I, J, G,
    KIND: tl.constexpr, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, BLOCK_O: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """RUNS: of 16 words, in each of a program's rows."""
    row_O = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    run_R = tl.program_id(1) * RUNS + tl.arange(0, RUNS)
    j = tl.program_id(1) * RUNS * 16 + tl.arange(0, RUNS * 16)
    ok_O = row_O < O
    row_O = row_O.to(tl.int64)
    c_OJ = tl.load(codes + row_O[:, None] * J + j[None, :], mask=ok_O[:, None] & (j < J)[None, :], other=0)
    none_O = tl.zeros([BLOCK_O], tl.float32)
    scales_O, zeros_O = scales + row_O * G, zeros + row_O * G
    dtype = out.dtype.element_ty
    # Tiles of 16 columns are put side by side before they are stored, so that a warp writes whole rows of a cache line.
    RUN: tl.constexpr = 64 if KIND == "int4" or KIND == "e2m1" else 32
    i_R = run_R * RUN
    if RUN == 64:
        a_OJ, b_OJ, c_OJ, d_OJ = values_of_4_bits(c_OJ, none_O, none_O, KIND, False, False, tl.float32)
        a_ORw = _scaled(a_OJ, i_R, scales_O, zeros_O, ok_O, I, GROUP, HAS_ZEROS, RUNS).to(dtype)
        b_ORw = _scaled(b_OJ, i_R + 16, scales_O, zeros_O, ok_O, I, GROUP, HAS_ZEROS, RUNS).to(dtype)
        c_ORw = _scaled(c_OJ, i_R + 32, scales_O, zeros_O, ok_O, I, GROUP, HAS_ZEROS, RUNS).to(dtype)
        d_ORw = _scaled(d_OJ, i_R + 48, scales_O, zeros_O, ok_O, I, GROUP, HAS_ZEROS, RUNS).to(dtype)
        all_ORwlh = tl.join(tl.join(a_ORw, b_ORw), tl.join(c_ORw, d_ORw))
        w_OI = tl.reshape(tl.permute(all_ORwlh, (0, 1, 4, 3, 2)), [BLOCK_O, RUNS * RUN])
    else:
        a_OJ, b_OJ = values_of_8_bits(c_OJ, none_O, KIND, False, False, tl.float32)
        a_ORw = _scaled(a_OJ, i_R, scales_O, zeros_O, ok_O, I, GROUP, HAS_ZEROS, RUNS).to(dtype)
        b_ORw = _scaled(b_OJ, i_R + 16, scales_O, zeros_O, ok_O, I, GROUP, HAS_ZEROS, RUNS).to(dtype)
        w_OI = tl.reshape(tl.permute(tl.join(a_ORw, b_ORw), (0, 1, 3, 2)), [BLOCK_O, RUNS * RUN])
    i = tl.program_id(1) * RUNS * RUN + tl.arange(0, RUNS * RUN)
    tl.store(out + row_O[:, None] * I + i[None, :], w_OI, mask=ok_O[:, None] & (i < I)[None, :])


@triton.jit
def _scaled(
    w_OJ, i_R, scales_O, zeros_O, ok_O, I, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, RUNS: tl.constexpr
):  # fmt: skip
    """The numbers of the 16 columns from each of i_R on: [O, RUNS, 16].  These 16 have one scale."""
    w_ORw = tl.reshape(w_OJ, [w_OJ.shape[0], RUNS, 16])
    g_R = i_R // GROUP if GROUP > 0 else i_R * 0
    ok_OR = ok_O[:, None] & (i_R < I)[None, :]
    if HAS_ZEROS:
        w_ORw -= tl.load(zeros_O[:, None] + g_R[None, :], mask=ok_OR, other=0).to(tl.float32)[:, :, None]
    return w_ORw * tl.load(scales_O[:, None] + g_R[None, :], mask=ok_OR, other=0.0).to(tl.float32)[:, :, None]


def launch_dequantise(weight: QuantisedMatrix, dtype: torch.dtype) -> Tensor:
    """[O, I], contiguous."""
    words_OJ = weight.qweight_NJ.view(torch.int16)
    O, J = words_OJ.shape
    out_OI = torch.empty(O, weight.columns, dtype=dtype, device=weight.qweight_NJ.device)
    assert weight.scales_NG.dtype != torch.float64
    assert weight.group % TILE == 0, weight.group
    run = TILE * pack_factor_of(weight.kind)
    block_n, runs = NUMBERS // COLUMNS, COLUMNS // run
    dequantise_kernel[(triton.cdiv(O, block_n), triton.cdiv(J, runs * TILE))](
        words_OJ, weight.scales_NG, weight.scales_NG if weight.zero_points_NG is None else weight.zero_points_NG, out_OI,
        O, weight.columns, J, weight.scales_NG.shape[1], KIND=weight.kind, GROUP=weight.group,
        HAS_ZEROS=weight.zero_points_NG is not None, BLOCK_O=block_n, RUNS=runs,
    )  # fmt: skip
    return out_OI
