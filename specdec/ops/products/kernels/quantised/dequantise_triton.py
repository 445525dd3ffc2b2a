"""The kernel that dequantises a weight for products of many rows, which a library multiplies.

Shapes: N rows, K columns, J words of a row of qweight, G groups of a row, R runs of 16 words, w words of a run.
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

VALUES, COLUMNS = 4096, 512  # of a program


@triton.jit
def dequantise_kernel(
    qweight,  # words [N, J]
    scales,  # [N, G]
    zero_points,  # as scales
    out,  # [N, K]
    N, K, J, G,
    KIND: tl.constexpr, GROUP_SIZE: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr, BLOCK_N: tl.constexpr, RUNS: tl.constexpr,
):  # fmt: skip
    """RUNS: of 16 words, in each of a program's rows."""
    row_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    run_R = tl.program_id(1) * RUNS + tl.arange(0, RUNS)
    j = tl.program_id(1) * RUNS * 16 + tl.arange(0, RUNS * 16)
    ok_N = row_N < N
    row_N = row_N.to(tl.int64)
    words_NJ = tl.load(qweight + row_N[:, None] * J + j[None, :], mask=ok_N[:, None] & (j < J)[None, :], other=0)
    none_N = tl.zeros([BLOCK_N], tl.float32)
    scales_N, zero_points_N = scales + row_N * G, zero_points + row_N * G
    dtype = out.dtype.element_ty
    # Tiles of 16 columns are put side by side before they are stored, so that a warp writes whole rows of a cache line.
    RUN: tl.constexpr = 64 if KIND == "int4" or KIND == "e2m1" else 32
    k_R = run_R * RUN
    if RUN == 64:
        a_NJ, b_NJ, c_NJ, d_NJ = values_of_4_bits(words_NJ, none_N, none_N, KIND, False, False, tl.float32)
        a_NRw = _scaled(a_NJ, k_R, scales_N, zero_points_N, ok_N, K, GROUP_SIZE, HAS_ZERO_POINTS, RUNS).to(dtype)
        b_NRw = _scaled(b_NJ, k_R + 16, scales_N, zero_points_N, ok_N, K, GROUP_SIZE, HAS_ZERO_POINTS, RUNS).to(dtype)
        c_NRw = _scaled(c_NJ, k_R + 32, scales_N, zero_points_N, ok_N, K, GROUP_SIZE, HAS_ZERO_POINTS, RUNS).to(dtype)
        d_NRw = _scaled(d_NJ, k_R + 48, scales_N, zero_points_N, ok_N, K, GROUP_SIZE, HAS_ZERO_POINTS, RUNS).to(dtype)
        all_NRwlh = tl.join(tl.join(a_NRw, b_NRw), tl.join(c_NRw, d_NRw))
        w_NK = tl.reshape(tl.permute(all_NRwlh, (0, 1, 4, 3, 2)), [BLOCK_N, RUNS * RUN])
    else:
        a_NJ, b_NJ = values_of_8_bits(words_NJ, none_N, KIND, False, False, tl.float32)
        a_NRw = _scaled(a_NJ, k_R, scales_N, zero_points_N, ok_N, K, GROUP_SIZE, HAS_ZERO_POINTS, RUNS).to(dtype)
        b_NRw = _scaled(b_NJ, k_R + 16, scales_N, zero_points_N, ok_N, K, GROUP_SIZE, HAS_ZERO_POINTS, RUNS).to(dtype)
        w_NK = tl.reshape(tl.permute(tl.join(a_NRw, b_NRw), (0, 1, 3, 2)), [BLOCK_N, RUNS * RUN])
    k = tl.program_id(1) * RUNS * RUN + tl.arange(0, RUNS * RUN)
    tl.store(out + row_N[:, None] * K + k[None, :], w_NK, mask=ok_N[:, None] & (k < K)[None, :])


@triton.jit
def _scaled(
    w_NJ, k_R, scales_N, zero_points_N, ok_N, K, GROUP_SIZE: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr, RUNS: tl.constexpr
):  # fmt: skip
    """The dense values of the 16 columns from each of k_R on: [N, RUNS, 16].  These 16 have one scale."""
    w_NRw = tl.reshape(w_NJ, [w_NJ.shape[0], RUNS, 16])
    g_R = k_R // GROUP_SIZE if GROUP_SIZE > 0 else k_R * 0
    ok_NR = ok_N[:, None] & (k_R < K)[None, :]
    if HAS_ZERO_POINTS:
        w_NRw -= tl.load(zero_points_N[:, None] + g_R[None, :], mask=ok_NR, other=0).to(tl.float32)[:, :, None]
    return w_NRw * tl.load(scales_N[:, None] + g_R[None, :], mask=ok_NR, other=0.0).to(tl.float32)[:, :, None]


def launch_dequantise(weight: QuantisedMatrix, dtype: torch.dtype) -> Tensor:
    """[N, K], contiguous."""
    words_NJ = weight.qweight_NJ.view(torch.int16)
    N, J = words_NJ.shape
    out_NK = torch.empty(N, weight.columns, dtype=dtype, device=weight.qweight_NJ.device)
    assert weight.scales_NG.dtype != torch.float64
    assert weight.group_size % TILE == 0, weight.group_size
    run = TILE * pack_factor_of(weight.kind)
    block_n, runs = VALUES // COLUMNS, COLUMNS // run
    dequantise_kernel[(triton.cdiv(N, block_n), triton.cdiv(J, runs * TILE))](
        words_NJ, weight.scales_NG, weight.scales_NG if weight.zero_points_NG is None else weight.zero_points_NG, out_NK,
        N, weight.columns, J, weight.scales_NG.shape[1], KIND=weight.kind, GROUP_SIZE=weight.group_size,
        HAS_ZERO_POINTS=weight.zero_points_NG is not None, BLOCK_N=block_n, RUNS=runs,
    )  # fmt: skip
    return out_NK
