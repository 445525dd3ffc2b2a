"""A product with any number of rows of x, whose sums have the order of stream_triton.py's kernel.

Prompts and large batches need tiles of many rows, where tensor cores do the work.  Each element of the result is a sum over
columns, and this kernel adds them up in the order in which stream_triton.py does: step by step from the first column of a
split to its last, and then the splits from the first to the last.  Here one program computes all splits, one after the other.
So a row's result is the same, bit for bit, in both kernels.

Tiles are loaded by TMA, and a program multiplies two tiles of weight rows with the same x, as in large_n_triton.py.

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
from specdec.ops.products.kernels.dense.large_n_triton import store_pair
from specdec.ops.products.tiles.dense import STEP

if TYPE_CHECKING:
    from specdec.ops.products.tiles.dense import ProductTiles

GROUP_M = 8  # tiles of x whose programs are neighbours, so that they read the same tiles of the weight from L2


@triton.jit(do_not_specialize=["M", "columns"])  # for the reason given at linear_kernel
def tiled_linear_kernel(
    x_tiles,  # tiles [BLOCK_M, BLOCK_K] of x [M, K]
    weight_tiles,  # tiles [HALF, BLOCK_K] of the weight, [N, K], or [2 * N, K] if GATED
    bias,  # [N] or [2 * N]
    y,  # [M, N]
    M, N, K,
    columns,  # of a split
    BLOCK_M: tl.constexpr, HALF: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    OUTS: tl.constexpr = HALF if GATED else 2 * HALF
    tiles_n, tiles_m = tl.cdiv(N, OUTS), tl.cdiv(M, BLOCK_M)
    group = tl.program_id(0) // (GROUP_M * tiles_n)
    members = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    within = tl.program_id(0) % (GROUP_M * tiles_n)
    first_m = (group * GROUP_M + within % members) * BLOCK_M
    a = within // members * OUTS  # first rows of the two tiles of weight
    b = a + (N if GATED else HALF)
    if PDL:
        tl.extra.cuda.gdc_wait()

    a_sum = tl.zeros([HALF, BLOCK_M], tl.float32)
    b_sum = tl.zeros([HALF, BLOCK_M], tl.float32)
    for split in range(SPLITS):  # the first sum is added to 0, as a split product's kernel does
        a_HM = tl.zeros([HALF, BLOCK_M], tl.float32)
        b_HM = tl.zeros([HALF, BLOCK_M], tl.float32)
        for k in tl.range(split * columns, tl.minimum(split * columns + columns, K), BLOCK_K, num_stages=STAGES):
            x_KM = tl.trans(x_tiles.load([first_m, k]))
            a_HM = tl.dot(weight_tiles.load([a, k]), x_KM, a_HM, input_precision="ieee")
            b_HM = tl.dot(weight_tiles.load([b, k]), x_KM, b_HM, input_precision="ieee")
        a_sum += a_HM
        b_sum += b_HM
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    store_pair(a_sum, b_sum, bias, y, a, first_m, M, N, BLOCK_M, HALF, GATED, HAS_BIAS)


def launch_tiled_linear(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, gated: bool, tiles: ProductTiles) -> Tensor:
    """[M, N], or [M, F] if gated.  Rows of x and of the weight must start at multiples of 16 bytes."""
    (M, K), rows = x_MK.shape, weight_NK.shape[0]
    N, half = rows // 2 if gated else rows, tiles.block_n // 2
    assert weight_NK.shape[1] == K and weight_NK.is_contiguous() and x_MK.stride(1) == 1 and x_MK.dtype == weight_NK.dtype
    assert bias_N is None or bias_N.shape == (rows,)
    columns = -(-triton.cdiv(K, STEP) // tiles.splits) * STEP  # of a split
    assert columns % tiles.block_k == 0
    y_MN = x_MK.new_empty(M, N)
    if M:
        programs = triton.cdiv(N, half if gated else tiles.block_n) * triton.cdiv(M, tiles.block_m)
        tiled_linear_kernel[(programs,)](
            TensorDescriptor(x_MK, list(x_MK.shape), list(x_MK.stride()), [tiles.block_m, tiles.block_k]),
            TensorDescriptor(weight_NK, list(weight_NK.shape), list(weight_NK.stride()), [half, tiles.block_k]),
            weight_NK if bias_N is None else bias_N, y_MN, M, N, K, columns,
            BLOCK_M=tiles.block_m, HALF=half, BLOCK_K=tiles.block_k, SPLITS=tiles.splits, STAGES=tiles.stages,
            GATED=gated, HAS_BIAS=bias_N is not None, GROUP_M=GROUP_M,
            num_warps=tiles.warps, num_stages=tiles.stages, **chained(x_MK.device),
        )  # fmt: skip
    return y_MN
