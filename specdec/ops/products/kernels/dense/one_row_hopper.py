"""A product of one row with a small weight, written in Gluon for Hopper GPUs: registers hold the weight before x exists.

A small weight takes less time to read than a launch takes to begin and to end.  So here each thread loads its whole part of the
weight, which no kernel writes, before it waits for the kernel in front (specdec/ops/launch.py).  After the wait one trip to
memory is left, for x.  The sums need neither tensor cores nor shared memory: a row of the weight lies in some lanes of a warp,
which add up what they have by shuffles.

A gated product's thread holds a row of the gate and the row of up that belongs to it.

Order of chained launches: the kernel triggers right after its wait.

This module knows no model's shapes and chooses no tiles.

Shapes: K in, N out; a gated product's weight has 2N rows: gate rows first, then up rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from specdec.ops.hopper import gdc_launch_dependents, gdc_wait
from specdec.ops.launch import chained

if TYPE_CHECKING:
    from specdec.ops.products.tiles.dense import ProductTiles

VECTOR = 8  # numbers that a thread loads at once


@gluon.jit
def one_row_kernel(
    x,  # [1, K]
    weight,  # [N, K], of a gated product [2 * N, K]
    bias,  # [N] or [2 * N]
    y,  # [1, N]
    N,
    K: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GATED: gl.constexpr, HAS_BIAS: gl.constexpr,
    PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """BLOCK_K: columns that a warp's lanes load side by side."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_K, BLOCK_K // 8], [num_warps, 1], [1, 0])
    n = gl.program_id(0) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, layout))
    k = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))
    row_N = gl.where(n < N, n, 0)  # a row that is not there reads row 0, and is not stored
    at_N = weight + row_N.to(gl.int64) * K
    words = _in_parts(at_N[:, None] + k[None, :], k[None, :], K, BLOCK_K)
    first = gl.zeros([BLOCK_N], gl.float32, gl.SliceLayout(1, layout))
    second = first
    if HAS_BIAS:
        first += gl.load(bias + row_N).to(gl.float32)
    if GATED:
        up_N = weight + (row_N.to(gl.int64) + N) * K
        more_words = _in_parts(up_N[:, None] + k[None, :], k[None, :], K, BLOCK_K)
        if HAS_BIAS:
            second += gl.load(bias + N + row_N).to(gl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    parts = _in_parts(x + k, k, K, BLOCK_K)
    first += _sum(words, parts, K, BLOCK_K)
    if GATED:
        second += _sum(more_words, parts, K, BLOCK_K)
        first = first / (1 + gl.exp(-first)) * second
    gl.store(y + n, first.to(y.dtype.element_ty), mask=n < N)


@gluon.jit
def _in_parts(at, k, K: gl.constexpr, BLOCK_K: gl.constexpr):
    """What lies there in K columns, BLOCK_K in each tensor; 0 beyond the last one."""
    found = (_part(at, k, K, BLOCK_K),)
    for low in gl.static_range(BLOCK_K, K, BLOCK_K):
        found = found + (_part(at + low, k + low, K, BLOCK_K),)  # type: ignore[assignment]
    return found


@gluon.jit
def _part(at, k, K: gl.constexpr, BLOCK_K: gl.constexpr):
    if K % BLOCK_K == 0:
        return gl.load(at)
    else:
        return gl.load(at, mask=k < K, other=0.0)


@gluon.jit
def _sum(words, parts, K: gl.constexpr, BLOCK_K: gl.constexpr):
    """[N]: the products of a row of x and rows of the weight."""
    acc = words[0].to(gl.float32) * parts[0].to(gl.float32)[None, :]
    for i in gl.static_range(1, (K + BLOCK_K - 1) // BLOCK_K):
        acc += words[i].to(gl.float32) * parts[i].to(gl.float32)[None, :]
    return gl.sum(acc, axis=1)


def launch_one_row(x_1K: Tensor, weight_NK: Tensor, bias_N: Tensor | None, gated: bool, tiles: ProductTiles) -> Tensor:
    """[1, N], summed in float32 and rounded once."""
    (rows, K), outs = weight_NK.shape, weight_NK.shape[0] // (2 if gated else 1)
    assert x_1K.shape == (1, K) and x_1K.stride(1) == 1 and weight_NK.is_contiguous() and x_1K.dtype == weight_NK.dtype
    assert K % VECTOR == 0 and (bias_N is None or bias_N.shape == (rows,))
    y_1N = x_1K.new_empty(1, outs)
    one_row_kernel[(triton.cdiv(outs, tiles.block_n),)](
        x_1K, weight_NK, weight_NK if bias_N is None else bias_N, y_1N, outs, K=K, BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k, GATED=gated, HAS_BIAS=bias_N is not None, num_warps=tiles.warps, **chained(x_1K.device),
    )  # fmt: skip
    return y_1N
