"""A product of a few rows with a small weight, written in Gluon for Hopper GPUs: what one_row_hopper.py is for a single row.

Here too each thread loads its whole part of the weight into registers before it waits for the kernel in front, and does so in
the order in which the tensor cores' instruction (mma) takes it.  A thread loads 16 bytes of a row, 8 columns; thread t of four
has columns 8t to 8t + 7 of 32, and the instruction takes these 32 columns in another order than they lie in.  Columns of x are
loaded in the same order, and a sum does not depend on it.

The warps of a program share the columns, and add up their sums through shared memory at the end.  In a gated product, 8 rows of
the gate alternate with the 8 rows of up that belong to them, so that a thread holds both of a pair.  More rows of x than a tile
has are those of other programs, which read the same weight from L2: it is small.

Order of chained launches (specdec/ops/launch.py): the kernel triggers right after its wait.

This module knows no model's shapes and chooses no tiles.

Shapes: M rows, K in, N out; a gated product's weight has 2N rows: gate rows first, then up rows.  S slices of the columns, one
a warp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from specdec.ops.hopper import gdc_launch_dependents, gdc_wait
from specdec.ops.launch import chained

if TYPE_CHECKING:
    from specdec.ops.products.tiles.dense import ProductTiles


@gluon.jit(do_not_specialize=["M"])  # for the reason given at linear_kernel
def held_rows_kernel(
    x,  # [M, K]
    weight,  # [N, K], of a gated product [2 * N, K]
    bias,  # [N] or [2 * N]
    y,  # [M, N]
    M, N, stride_x,
    K: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, PARTS: gl.constexpr, HAS_BIAS: gl.constexpr,
    PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """PARTS: 2 if gated, else 1.  BLOCK_N: rows of the weight, and BLOCK_M of x, of a program."""
    CHUNK: gl.constexpr = ((K + 31) // 32 + num_warps - 1) // num_warps  # units of a slice
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [num_warps, 1, 1], [1, 16, 8])
    out: gl.constexpr = gl.SliceLayout(0, layout)
    loads: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 8, 4], [num_warps, 1, 1], [2, 1, 0])
    of_rows: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, loads))
    s = gl.arange(0, num_warps, gl.SliceLayout(1, gl.SliceLayout(2, loads)))
    k = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, loads)))
    column_SK = (s * (CHUNK * 32))[:, None, None] + k[None, None, :]
    row_N = _rows(gl.program_id(0), N, BLOCK_N, PARTS, of_rows)
    words = _units(weight + (row_N.to(gl.int64) * K)[None, :, None], column_SK, K, CHUNK, True)
    row = _rows(gl.program_id(0), N, BLOCK_N, PARTS, gl.SliceLayout(1, out))
    bias_N = gl.zeros([BLOCK_N], gl.float32, gl.SliceLayout(1, out))
    if HAS_BIAS:
        bias_N += gl.load(bias + row).to(gl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    first = gl.program_id(1) * BLOCK_M
    m = first + gl.arange(0, BLOCK_M, of_rows)
    tiles = _units(x + (m * stride_x)[None, :, None], column_SK, K, CHUNK, (m < M)[None, :, None])
    acc = gl.zeros([num_warps, BLOCK_N, BLOCK_M], gl.float32, layout)
    for i in gl.static_range(CHUNK):
        acc = mma_v2(_left(words[i], layout), _right(tiles[i], layout), acc)
    total = gl.sum(acc, axis=0) + bias_N[:, None]
    m = first + gl.arange(0, BLOCK_M, gl.SliceLayout(0, out))
    out_N = _places(gl.program_id(0), BLOCK_N, PARTS, gl.SliceLayout(1, out))
    ok = ((out_N < N)[:, None] & (m < M)[None, :]).to(gl.int32)
    at = m[None, :] * N + out_N[:, None]
    if PARTS == 2:
        gate, up = _pair(total, BLOCK_N, BLOCK_M)
        at, _ = _pair(at, BLOCK_N, BLOCK_M)
        ok, _ = _pair(ok, BLOCK_N, BLOCK_M)
        total = gate / (1 + gl.exp(-gate)) * up
    gl.store(y + at, total.to(y.dtype.element_ty), mask=ok != 0)


@gluon.jit
def _places(tile, BLOCK_N: gl.constexpr, PARTS: gl.constexpr, layout: gl.constexpr):
    """Where what a tile's rows make lies in the result: of a gate and its up (PARTS is 2) at the same place."""
    n = gl.arange(0, BLOCK_N, layout)
    return tile * (BLOCK_N // PARTS) + n // (8 * PARTS) * 8 + n % 8


@gluon.jit
def _rows(tile, N, BLOCK_N: gl.constexpr, PARTS: gl.constexpr, layout: gl.constexpr):
    """A tile's rows of the weight; one that is not there reads row 0, and is not stored."""
    n, out_N = gl.arange(0, BLOCK_N, layout), _places(tile, BLOCK_N, PARTS, layout)
    return gl.where(out_N < N, out_N + n // 8 % PARTS * N, 0)


@gluon.jit
def _pair(value, BLOCK_N: gl.constexpr, BLOCK_M: gl.constexpr):
    """The gate's rows and up's."""
    return gl.split(gl.permute(gl.reshape(value, [BLOCK_N // 16, 2, 8, BLOCK_M]), (0, 2, 3, 1)))


@gluon.jit
def _units(at, column_SK, K: gl.constexpr, CHUNK: gl.constexpr, ok):
    """A slice's columns of rows that begin there, 32 in each tensor [S, R, 32]; 0 beyond the last column, and of other rows."""
    found = (gl.load(at + column_SK, mask=(column_SK < K) & ok, other=0.0),)
    for i in gl.static_range(1, CHUNK):
        column = column_SK + i * 32
        found = found + (gl.load(at + column, mask=(column < K) & ok, other=0.0),)  # type: ignore[assignment]
    return found


@gluon.jit
def _left(tile, layout: gl.constexpr):
    """A unit of the weight as the first operand of the tensor cores, [S, N, 32]."""
    S: gl.constexpr = tile.shape[0]
    N: gl.constexpr = tile.shape[1]
    parts = gl.permute(gl.reshape(tile, [S, N, 4, 2, 2, 2]), (0, 1, 3, 4, 2, 5))
    return gl.convert_layout(gl.reshape(parts, [S, N, 32]), gl.DotOperandLayout(0, layout, 2), assert_trivial=True)


@gluon.jit
def _right(tile, layout: gl.constexpr):
    """A unit of x as the second one, [S, 32, M]."""
    S: gl.constexpr = tile.shape[0]
    M: gl.constexpr = tile.shape[1]
    parts = gl.permute(gl.reshape(tile, [S, M, 4, 2, 2, 2]), (0, 3, 4, 2, 5, 1))
    return gl.convert_layout(gl.reshape(parts, [S, 32, M]), gl.DotOperandLayout(1, layout, 2), assert_trivial=True)


def launch_held_rows(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, gated: bool, tiles: ProductTiles) -> Tensor:
    """[M, N], summed in float32 and rounded once.  The rows of x may be strided."""
    (M, K), (rows, columns), parts = x_MK.shape, weight_NK.shape, 2 if gated else 1
    N = rows // parts
    assert M > 0 and columns == K and x_MK.stride(1) == 1 and weight_NK.is_contiguous() and K % 8 == 0
    assert x_MK.dtype == weight_NK.dtype and (bias_N is None or bias_N.shape == (rows,))
    y_MN = x_MK.new_empty(M, N)
    held_rows_kernel[(triton.cdiv(rows, tiles.block_n), triton.cdiv(M, tiles.block_m))](
        x_MK, weight_NK, weight_NK if bias_N is None else bias_N, y_MN, M, N, x_MK.stride(0), K=K, BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n, PARTS=parts, HAS_BIAS=bias_N is not None, num_warps=tiles.warps, **chained(x_MK.device),
    )  # fmt: skip
    return y_MN
