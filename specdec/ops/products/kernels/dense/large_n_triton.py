"""Large-N products with 65 to 192 rows of x, gated or not, for which cuBLAS falls short of the memory's speed.

Beyond 64 rows tensor cores and L2 have to keep up with memory.  So tiles are loaded by TMA, which needs no registers for
addresses and pads with zeros.  A program multiplies two tiles of weight rows with the same x: the gate's and the up's, or two
neighbours.  Triton's tiles are powers of two, so 192 rows of x become two pieces, 128 and 64, that share one read of the
weight.  The launch is chained as in stream_triton.py.  This module knows no model's shapes and chooses no tiles.

wgmma takes 64 rows of the first operand at a time, and up to 256 of the second one.  So where every piece of x has at least 64
rows, x is the first operand and both tiles of the weight are one second operand: at 192 rows operands are then read from shared
memory 20 percent less often than with the weight as the first operand, and a GPU at its power limit is faster for it.

Shapes: M rows, K in, N out, H rows of one of a program's two tiles of the weight; a gated product has F = N, and its weight
has 2F rows: gate rows first, then up rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from specdec.ops.launch import chained
from specdec.ops.products.kernels.dense.stream_triton import prefetch

if TYPE_CHECKING:
    from specdec.ops.products.tiles.dense import ProductTiles

WGMMA_M = 64  # rows of the first operand of wgmma
PREFETCH = 256  # elements of each row that are prefetched into L2 before the wait; measured


@triton.jit(do_not_specialize=["M"])  # for the reason given at linear_kernel
def large_n_linear_kernel(
    x_low,  # tiles [LOW, BLOCK_K] of x [M, K]
    x_high,  # tiles [HIGH, BLOCK_K]
    weight_tiles,  # tiles [HALF, BLOCK_K] of weight
    weight,  # [N, K], or [2 * N, K] if GATED
    bias,  # [N] or [2 * N]
    y,  # [M, N]
    M, N, K,
    LOW: tl.constexpr, HIGH: tl.constexpr, HALF: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if GATED:
        a = tl.program_id(0) * HALF  # first rows of the two tiles of weight
        b = N + a
    else:
        a = tl.program_id(0) * (2 * HALF)
        b = a + HALF
    if PDL:
        _prefetch_rows(weight, a, b, N, K, HALF, GATED, PREFETCH)
        tl.extra.cuda.gdc_wait()

    a_low = tl.zeros([HALF, LOW], tl.float32)
    b_low = tl.zeros([HALF, LOW], tl.float32)
    if HIGH > 0:
        a_high = tl.zeros([HALF, HIGH], tl.float32)
        b_high = tl.zeros([HALF, HIGH], tl.float32)
    halfway = K // BLOCK_K // 2 * BLOCK_K
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if PDL:
            if k == halfway:
                tl.extra.cuda.gdc_launch_dependents()
        a_HK = weight_tiles.load([a, k])
        b_HK = weight_tiles.load([b, k])
        low_KM = tl.trans(x_low.load([0, k]))
        a_low = tl.dot(a_HK, low_KM, a_low, input_precision="ieee")
        b_low = tl.dot(b_HK, low_KM, b_low, input_precision="ieee")
        if HIGH > 0:
            high_KM = tl.trans(x_high.load([LOW, k]))
            a_high = tl.dot(a_HK, high_KM, a_high, input_precision="ieee")
            b_high = tl.dot(b_HK, high_KM, b_high, input_precision="ieee")

    store_pair(a_low, b_low, bias, y, a, 0, M, N, LOW, HALF, GATED, HAS_BIAS)
    if HIGH > 0:
        store_pair(a_high, b_high, bias, y, a, LOW, M, N, HIGH, HALF, GATED, HAS_BIAS)


@triton.jit(do_not_specialize=["M"])
def x_first_linear_kernel(
    x_low,  # tiles [LOW, BLOCK_K] of x [M, K]
    x_high,  # tiles [HIGH, BLOCK_K]
    weight_tiles,  # tiles [2, HALF, BLOCK_K] of weight as [2, N, K] if GATED, or [1, 2 * HALF, BLOCK_K] of [1, N, K]
    weight, bias, y,  # these and the rest as above
    M, N, K,
    LOW: tl.constexpr, HIGH: tl.constexpr, HALF: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, PREFETCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same product in two pieces of x, which are the first operand."""
    a = tl.program_id(0) * (HALF if GATED else 2 * HALF)
    if PDL:
        _prefetch_rows(weight, a, a + (N if GATED else HALF), N, K, HALF, GATED, PREFETCH)
        tl.extra.cuda.gdc_wait()
    low = tl.zeros([LOW, 2 * HALF], tl.float32)
    high = tl.zeros([HIGH, 2 * HALF], tl.float32)
    halfway = K // BLOCK_K // 2 * BLOCK_K
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if PDL:
            if k == halfway:
                tl.extra.cuda.gdc_launch_dependents()
        w_KN = tl.trans(tl.reshape(weight_tiles.load([0, a, k]), [2 * HALF, BLOCK_K]))
        low = tl.dot(x_low.load([0, k]), w_KN, low, input_precision="ieee")
        high = tl.dot(x_high.load([LOW, k]), w_KN, high, input_precision="ieee")
    a_low, b_low = tl.split(tl.permute(tl.reshape(low, [LOW, 2, HALF]), (2, 0, 1)))
    store_pair(a_low, b_low, bias, y, a, 0, M, N, LOW, HALF, GATED, HAS_BIAS)
    a_high, b_high = tl.split(tl.permute(tl.reshape(high, [HIGH, 2, HALF]), (2, 0, 1)))
    store_pair(a_high, b_high, bias, y, a, LOW, M, N, HIGH, HALF, GATED, HAS_BIAS)


@triton.jit
def _prefetch_rows(weight, a, b, N, K, HALF: tl.constexpr, GATED: tl.constexpr, PREFETCH: tl.constexpr):
    """Prefetches the first PREFETCH elements of a program's rows of the weight into L2."""
    LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth  # elements of 128 bytes
    row = a + tl.arange(0, HALF)
    ahead = tl.arange(0, PREFETCH // LINE) * LINE
    at = weight + row.to(tl.int64)[:, None] * K + ahead[None, :]
    prefetch(at, (row < N)[:, None] & (ahead < K)[None, :])
    prefetch(at + (b - a).to(tl.int64) * K, (row + (0 if GATED else HALF) < N)[:, None] & (ahead < K)[None, :])


@triton.jit
def store_pair(
    a_HM, b_HM, bias, y, first, first_m, M, N,
    BLOCK_M: tl.constexpr, HALF: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Adds the bias, applies SiLU-mul if gated, rounds once and stores the rows of x from first_m on."""
    out_H = first + tl.arange(0, HALF)
    m = first_m + tl.arange(0, BLOCK_M)
    at_HM = y + m.to(tl.int64)[None, :] * N + out_H[:, None]
    ok_M = (m < M)[None, :]
    if HAS_BIAS:
        a_HM += tl.load(bias + out_H, mask=out_H < N, other=0.0).to(tl.float32)[:, None]
        ok_H = (out_H if GATED else out_H + HALF) < N
        b_HM += tl.load(bias + (N if GATED else HALF) + out_H, mask=ok_H, other=0.0).to(tl.float32)[:, None]
    if GATED:
        out_HM = a_HM / (1 + tl.exp(-a_HM)) * b_HM
        tl.store(at_HM, out_HM.to(y.dtype.element_ty), mask=(out_H < N)[:, None] & ok_M)
    else:
        tl.store(at_HM, a_HM.to(y.dtype.element_ty), mask=(out_H < N)[:, None] & ok_M)
        tl.store(at_HM + HALF, b_HM.to(y.dtype.element_ty), mask=(out_H + HALF < N)[:, None] & ok_M)


def launch_large_n_linear(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, gated: bool, tiles: ProductTiles) -> Tensor:
    """[M, N], or [M, F] if gated.  The rows of x may be strided; tiles.block_m is a power of two or the sum of two."""
    (M, K), rows = x_MK.shape, weight_NK.shape[0]
    N, half = rows // 2 if gated else rows, tiles.block_n // 2
    low = 1 << (tiles.block_m.bit_length() - 1)
    high = tiles.block_m - low
    assert 0 < M <= tiles.block_m and weight_NK.shape[1] == K and weight_NK.is_contiguous() and x_MK.stride(1) == 1
    assert x_MK.dtype == weight_NK.dtype and (bias_N is None or bias_N.shape == (rows,)) and tiles.splits == 1
    y_MN = x_MK.new_empty(M, N)
    kernel, of_weight = large_n_linear_kernel, _tiles_of(weight_NK, half, tiles.block_k)
    if high >= WGMMA_M:
        parts, kernel = 2 if gated else 1, x_first_linear_kernel
        of_weight = _tiles_of(weight_NK.view(parts, N, K), parts, tiles.block_n // parts, tiles.block_k)
    kernel[(triton.cdiv(N, half if gated else tiles.block_n),)](
        _tiles_of(x_MK, low, tiles.block_k), _tiles_of(x_MK, high or low, tiles.block_k), of_weight,
        weight_NK, weight_NK if bias_N is None else bias_N, y_MN, M, N, K,
        LOW=low, HIGH=high, HALF=half, BLOCK_K=tiles.block_k, STAGES=tiles.stages, GATED=gated,
        HAS_BIAS=bias_N is not None, PREFETCH=PREFETCH, num_warps=tiles.warps, num_stages=tiles.stages, **chained(x_MK.device),
    )  # fmt: skip
    return y_MN


def _tiles_of(matrix: Tensor, *sides: int) -> TensorDescriptor:
    """The TMA descriptor of tiles with these sides."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), list(sides))
