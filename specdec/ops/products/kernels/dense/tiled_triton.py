"""A product with any number of rows of x, whose sums have the order of stream_triton.py's kernel.

Prompts and large batches need tiles of many rows, where tensor cores do the work.  Each element of the result is a sum over
columns, and this kernel adds them up in the order in which stream_triton.py does: step by step from the first column of a
split to its last, and then the splits from the first to the last.  Here one program computes all splits, one after the other.
So a row's result is the same, bit for bit, in both kernels.

Tiles are loaded by TMA, and a program multiplies two tiles of weight rows with the same x, as in wide_triton.py.

Shapes: T rows, I in, O out; a gated product has F = O, and its weight has 2F rows: gate rows first, then up rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from specdec.ops.launch import chained
from specdec.ops.products.kernels.dense.wide_triton import store_pair
from specdec.ops.products.tiles.dense import STEP

if TYPE_CHECKING:
    from specdec.ops.products.tiles.dense import ProductTiles

TOGETHER = 8  # tiles of x whose programs are neighbours, so that they read the same tiles of the weight from L2


@triton.jit(do_not_specialize=["T", "columns"])  # for the reason given at linear_kernel
def tiled_linear_kernel(
    x_tiles,  # tiles [BLOCK_T, BLOCK_I] of x [T, I]
    weight_tiles,  # tiles [HALF, BLOCK_I] of the weight, [O, I], or [2 * O, I] if GATED
    bias,  # [O] or [2 * O]
    y,  # [T, O]
    T, O, I,
    columns,  # of a split
    BLOCK_T: tl.constexpr, HALF: tl.constexpr, BLOCK_I: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, TOGETHER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    OUTS: tl.constexpr = HALF if GATED else 2 * HALF
    of_o, of_t = tl.cdiv(O, OUTS), tl.cdiv(T, BLOCK_T)
    group = tl.program_id(0) // (TOGETHER * of_o)
    members = tl.minimum(of_t - group * TOGETHER, TOGETHER)
    within = tl.program_id(0) % (TOGETHER * of_o)
    first_t = (group * TOGETHER + within % members) * BLOCK_T
    a = within // members * OUTS  # first rows of the two tiles of weight
    b = a + (O if GATED else HALF)
    if PDL:
        tl.extra.cuda.gdc_wait()

    a_sum = tl.zeros([HALF, BLOCK_T], tl.float32)
    b_sum = tl.zeros([HALF, BLOCK_T], tl.float32)
    for split in range(SPLITS):  # the first sum is added to 0, as a split product's kernel does
        a_HT = tl.zeros([HALF, BLOCK_T], tl.float32)
        b_HT = tl.zeros([HALF, BLOCK_T], tl.float32)
        for k in tl.range(split * columns, tl.minimum(split * columns + columns, I), BLOCK_I, num_stages=STAGES):
            x_IT = tl.trans(x_tiles.load([first_t, k]))
            a_HT = tl.dot(weight_tiles.load([a, k]), x_IT, a_HT, input_precision="ieee")
            b_HT = tl.dot(weight_tiles.load([b, k]), x_IT, b_HT, input_precision="ieee")
        a_sum += a_HT
        b_sum += b_HT
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    store_pair(a_sum, b_sum, bias, y, a, first_t, T, O, BLOCK_T, HALF, GATED, HAS_BIAS)


def launch_tiled_linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, gated: bool, tiles: ProductTiles) -> Tensor:
    """[T, O], or [T, F] if gated.  Rows of x and of the weight must start at multiples of 16 bytes."""
    (T, I), rows = x_TI.shape, weight_OI.shape[0]
    O, half = rows // 2 if gated else rows, tiles.block_n // 2
    assert weight_OI.shape[1] == I and weight_OI.is_contiguous() and x_TI.stride(1) == 1 and x_TI.dtype == weight_OI.dtype
    assert bias_O is None or bias_O.shape == (rows,)
    columns = -(-triton.cdiv(I, STEP) // tiles.splits) * STEP  # of a split
    assert columns % tiles.block_k == 0
    y_TO = x_TI.new_empty(T, O)
    if T:
        programs = triton.cdiv(O, half if gated else tiles.block_n) * triton.cdiv(T, tiles.block_m)
        tiled_linear_kernel[(programs,)](
            TensorDescriptor(x_TI, list(x_TI.shape), list(x_TI.stride()), [tiles.block_m, tiles.block_k]),
            TensorDescriptor(weight_OI, list(weight_OI.shape), list(weight_OI.stride()), [half, tiles.block_k]),
            weight_OI if bias_O is None else bias_O, y_TO, T, O, I, columns,
            BLOCK_T=tiles.block_m, HALF=half, BLOCK_I=tiles.block_k, SPLITS=tiles.splits, STAGES=tiles.stages,
            GATED=gated, HAS_BIAS=bias_O is not None, TOGETHER=TOGETHER,
            num_warps=tiles.warps, num_stages=tiles.stages, **chained(x_TI.device),
        )  # fmt: skip
    return y_TO
