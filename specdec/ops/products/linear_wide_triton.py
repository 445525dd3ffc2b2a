"""A product with 65 to 192 rows of x and a wide weight, gated or not, for which cuBLAS falls short of the memory's speed.

Beyond 64 rows tensor cores and L2 have to keep up with memory.  So tiles are loaded by TMA, which needs no registers for
addresses and pads with zeros.  A program multiplies two tiles of weight rows with the same x: the gate's and the up's, or two
neighbours.  Triton's tiles are powers of two, so 192 rows of x become two pieces, 128 and 64, that share one read of the
weight.  The launch is chained as in linear_triton.py.  This module knows no model's shapes and chooses no tiles.

Shapes: T rows, I in, O out; a gated product has F = O, and its weight has 2F rows: gate rows first, then up rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from specdec.ops.launch import chained
from specdec.ops.products.linear_triton import _prefetch

if TYPE_CHECKING:
    from specdec.ops.products.tiles import ProductTiles

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
        LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth  # elements of 128 bytes
        row = a + tl.arange(0, HALF)
        ahead = tl.arange(0, AHEAD // LINE) * LINE
        at = weight + row.to(tl.int64)[:, None] * I + ahead[None, :]
        _prefetch(at, (row < O)[:, None] & (ahead < I)[None, :])
        _prefetch(at + (b - a).to(tl.int64) * I, (row + (0 if GATED else HALF) < O)[:, None] & (ahead < I)[None, :])
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

    _finish_pair(a_low, b_low, bias, y, a, 0, T, O, LOW, HALF, GATED, HAS_BIAS)
    if HIGH > 0:
        _finish_pair(a_high, b_high, bias, y, a, LOW, T, O, HIGH, HALF, GATED, HAS_BIAS)


@triton.jit
def _finish_pair(
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
    """[T, O], or [T, F] if gated.  The rows of x may be strided; tiles.block_t is a power of two or the sum of two."""
    (T, I), rows = x_TI.shape, weight_OI.shape[0]
    O, half = rows // 2 if gated else rows, tiles.block_o // 2
    low = 1 << (tiles.block_t.bit_length() - 1)
    high = tiles.block_t - low
    assert 0 < T <= tiles.block_t and weight_OI.shape[1] == I and weight_OI.is_contiguous() and x_TI.stride(1) == 1
    assert x_TI.dtype == weight_OI.dtype and (bias_O is None or bias_O.shape == (rows,)) and tiles.splits == 1
    y_TO = x_TI.new_empty(T, O)
    wide_linear_kernel[(triton.cdiv(O, half if gated else tiles.block_o),)](
        _rows_of(x_TI, low, tiles), _rows_of(x_TI, high or low, tiles), _rows_of(weight_OI, half, tiles),
        weight_OI, weight_OI if bias_O is None else bias_O, y_TO, T, O, I,
        LOW=low, HIGH=high, HALF=half, BLOCK_I=tiles.block_i, STAGES=tiles.stages, GATED=gated,
        HAS_BIAS=bias_O is not None, AHEAD=AHEAD, num_warps=tiles.warps, num_stages=tiles.stages, **chained(x_TI.device),
    )  # fmt: skip
    return y_TO


def _rows_of(matrix: Tensor, rows: int, tiles: ProductTiles) -> TensorDescriptor:
    """The copy engine's descriptor of tiles of `rows` rows."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, tiles.block_i])
