"""A product with 65 to 192 rows of x and a wide weight, gated or not, for which cuBLAS falls short of the memory's speed.

Beyond 64 rows tensor cores and L2 have to keep up with memory.  So tiles are loaded by TMA, which needs no registers for
addresses and pads with zeros.  A program multiplies two tiles of weight rows with the same x: the gate's and the up's, or two
neighbours.  Triton's tiles are powers of two, so 192 rows of x become two pieces, 128 and 64, that share one read of the
weight.  The launch is chained as in stream_triton.py.  This module knows no model's shapes and chooses no tiles.

The tensor cores take 64 rows of the first factor at a time, and up to 256 of the second one.  So where every piece of x has at
least 64 rows, x is the first factor and both tiles of the weight are one second factor: at 192 rows operands are then read from
shared memory 20 percent less often than with the weight in front, and a GPU at its power limit is faster for it.

Shapes: T rows, I in, O out; a gated product has F = O, and its weight has 2F rows: gate rows first, then up rows.
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

ROWS_OF_FIRST = 64  # of the first factor: the tensor cores multiply so many at once
AHEAD = 256  # elements of each row that are requested from L2 before the wait; measured


@triton.jit(do_not_specialize=["T"])  # for the reason given at linear_kernel
def wide_linear_kernel(
    x_low,  # tiles [LOW, BLOCK_I] of x [T, I]
    x_high,  # tiles [HIGH, BLOCK_I]
    weight_tiles,  # tiles [HALF, BLOCK_I] of weight
    weight,  # [O, I], or [2 * O, I] if GATED
    bias,  # [O] or [2 * O]
    y,  # [T, O]
    T, O, I,
    LOW: tl.constexpr, HIGH: tl.constexpr, HALF: tl.constexpr, BLOCK_I: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if GATED:
        a = tl.program_id(0) * HALF  # first rows of the two tiles of weight
        b = O + a
    else:
        a = tl.program_id(0) * (2 * HALF)
        b = a + HALF
    if PDL:
        _ask_for_rows(weight, a, b, O, I, HALF, GATED, AHEAD)
        tl.extra.cuda.gdc_wait()

    a_low = tl.zeros([HALF, LOW], tl.float32)
    b_low = tl.zeros([HALF, LOW], tl.float32)
    if HIGH > 0:
        a_high = tl.zeros([HALF, HIGH], tl.float32)
        b_high = tl.zeros([HALF, HIGH], tl.float32)
    halfway = I // BLOCK_I // 2 * BLOCK_I
    for k in tl.range(0, I, BLOCK_I, num_stages=STAGES):
        if PDL:
            if k == halfway:
                tl.extra.cuda.gdc_launch_dependents()
        a_HI = weight_tiles.load([a, k])
        b_HI = weight_tiles.load([b, k])
        low_IT = tl.trans(x_low.load([0, k]))
        a_low = tl.dot(a_HI, low_IT, a_low, input_precision="ieee")
        b_low = tl.dot(b_HI, low_IT, b_low, input_precision="ieee")
        if HIGH > 0:
            high_IT = tl.trans(x_high.load([LOW, k]))
            a_high = tl.dot(a_HI, high_IT, a_high, input_precision="ieee")
            b_high = tl.dot(b_HI, high_IT, b_high, input_precision="ieee")

    store_pair(a_low, b_low, bias, y, a, 0, T, O, LOW, HALF, GATED, HAS_BIAS)
    if HIGH > 0:
        store_pair(a_high, b_high, bias, y, a, LOW, T, O, HIGH, HALF, GATED, HAS_BIAS)


@triton.jit(do_not_specialize=["T"])
def x_first_linear_kernel(
    x_low,  # tiles [LOW, BLOCK_I] of x [T, I]
    x_high,  # tiles [HIGH, BLOCK_I]
    weight_tiles,  # tiles [2, HALF, BLOCK_I] of weight as [2, O, I] if GATED, or [1, 2 * HALF, BLOCK_I] of [1, O, I]
    weight, bias, y,  # these and the rest as above
    T, O, I,
    LOW: tl.constexpr, HIGH: tl.constexpr, HALF: tl.constexpr, BLOCK_I: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same product in two pieces of x, which are the first factor."""
    a = tl.program_id(0) * (HALF if GATED else 2 * HALF)
    if PDL:
        _ask_for_rows(weight, a, a + (O if GATED else HALF), O, I, HALF, GATED, AHEAD)
        tl.extra.cuda.gdc_wait()
    low = tl.zeros([LOW, 2 * HALF], tl.float32)
    high = tl.zeros([HIGH, 2 * HALF], tl.float32)
    halfway = I // BLOCK_I // 2 * BLOCK_I
    for k in tl.range(0, I, BLOCK_I, num_stages=STAGES):
        if PDL:
            if k == halfway:
                tl.extra.cuda.gdc_launch_dependents()
        w_IR = tl.trans(tl.reshape(weight_tiles.load([0, a, k]), [2 * HALF, BLOCK_I]))
        low = tl.dot(x_low.load([0, k]), w_IR, low, input_precision="ieee")
        high = tl.dot(x_high.load([LOW, k]), w_IR, high, input_precision="ieee")
    a_low, b_low = tl.split(tl.permute(tl.reshape(low, [LOW, 2, HALF]), (2, 0, 1)))
    store_pair(a_low, b_low, bias, y, a, 0, T, O, LOW, HALF, GATED, HAS_BIAS)
    a_high, b_high = tl.split(tl.permute(tl.reshape(high, [HIGH, 2, HALF]), (2, 0, 1)))
    store_pair(a_high, b_high, bias, y, a, LOW, T, O, HIGH, HALF, GATED, HAS_BIAS)


@triton.jit
def _ask_for_rows(weight, a, b, O, I, HALF: tl.constexpr, GATED: tl.constexpr, AHEAD: tl.constexpr):
    """Requests the first AHEAD elements of a program's rows of the weight from L2."""
    LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth  # elements of 128 bytes
    row = a + tl.arange(0, HALF)
    ahead = tl.arange(0, AHEAD // LINE) * LINE
    at = weight + row.to(tl.int64)[:, None] * I + ahead[None, :]
    prefetch(at, (row < O)[:, None] & (ahead < I)[None, :])
    prefetch(at + (b - a).to(tl.int64) * I, (row + (0 if GATED else HALF) < O)[:, None] & (ahead < I)[None, :])


@triton.jit
def store_pair(
    a_HT, b_HT, bias, y, first, first_t, T, O,
    ROWS: tl.constexpr, HALF: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Adds the bias, applies SiLU-mul if gated, rounds once and stores the rows of x from first_t on."""
    out_H = first + tl.arange(0, HALF)
    t = first_t + tl.arange(0, ROWS)
    at_HT = y + t.to(tl.int64)[None, :] * O + out_H[:, None]
    ok_T = (t < T)[None, :]
    if HAS_BIAS:
        a_HT += tl.load(bias + out_H, mask=out_H < O, other=0.0).to(tl.float32)[:, None]
        ok_H = (out_H if GATED else out_H + HALF) < O
        b_HT += tl.load(bias + (O if GATED else HALF) + out_H, mask=ok_H, other=0.0).to(tl.float32)[:, None]
    if GATED:
        out_HT = a_HT / (1 + tl.exp(-a_HT)) * b_HT
        tl.store(at_HT, out_HT.to(y.dtype.element_ty), mask=(out_H < O)[:, None] & ok_T)
    else:
        tl.store(at_HT, a_HT.to(y.dtype.element_ty), mask=(out_H < O)[:, None] & ok_T)
        tl.store(at_HT + HALF, b_HT.to(y.dtype.element_ty), mask=(out_H + HALF < O)[:, None] & ok_T)


def launch_wide_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, gated: bool, tiles: ProductTiles) -> Tensor:
    """[T, O], or [T, F] if gated.  The rows of x may be strided; tiles.block_m is a power of two or the sum of two."""
    (T, I), rows = x_TI.shape, weight_OI.shape[0]
    O, half = rows // 2 if gated else rows, tiles.block_n // 2
    low = 1 << (tiles.block_m.bit_length() - 1)
    high = tiles.block_m - low
    assert 0 < T <= tiles.block_m and weight_OI.shape[1] == I and weight_OI.is_contiguous() and x_TI.stride(1) == 1
    assert x_TI.dtype == weight_OI.dtype and (bias_O is None or bias_O.shape == (rows,)) and tiles.splits == 1
    y_TO = x_TI.new_empty(T, O)
    kernel, of_weight = wide_linear_kernel, _tiles_of(weight_OI, half, tiles.block_k)
    if high >= ROWS_OF_FIRST:
        parts, kernel = 2 if gated else 1, x_first_linear_kernel
        of_weight = _tiles_of(weight_OI.view(parts, O, I), parts, tiles.block_n // parts, tiles.block_k)
    kernel[(triton.cdiv(O, half if gated else tiles.block_n),)](
        _tiles_of(x_TI, low, tiles.block_k), _tiles_of(x_TI, high or low, tiles.block_k), of_weight,
        weight_OI, weight_OI if bias_O is None else bias_O, y_TO, T, O, I,
        LOW=low, HIGH=high, HALF=half, BLOCK_I=tiles.block_k, STAGES=tiles.stages, GATED=gated,
        HAS_BIAS=bias_O is not None, AHEAD=AHEAD, num_warps=tiles.warps, num_stages=tiles.stages, **chained(x_TI.device),
    )  # fmt: skip
    return y_TO


def _tiles_of(matrix: Tensor, *sides: int) -> TensorDescriptor:
    """The copy engine's descriptor of tiles with these sides."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), list(sides))
