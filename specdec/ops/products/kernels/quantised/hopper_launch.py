"""The product of few rows with a weight of 8 or 4 bits, or one in lossless 12 bits, written in Gluon for Hopper GPUs.

Its two kernels are ops/products/kernels/dense/stream_hopper.py's, whose docstring explains the order of loads and waits, for
quantised values instead of dense ones: TMA fills all stages with words of the weight before the product's input exists.  The
words go from shared memory to registers, are converted there to bfloat16, in which every quantised value is exact, and are the
first operand of the tensor cores.  Scales multiply float32 sums.  So nothing is rounded before the end.

- A scale for each row is applied once, to the complete sum.
- A lossless weight (ops/products/formats/lossless.py) has words of 8 bits and of 4 in stages of their own, and no scales.
- Scales for groups of columns, and zero points, are read into registers a step ahead, the first before the wait, since no
  kernel writes them.  A group's sum is multiplied by its scale.

One warp of a program is the producer, which only loads, and gives most of its registers to the consumer warps, which multiply.
A stage has three mbarriers: two say that its words and its columns of x are there (full), and one that they were read (empty).
Where the producer loads x, it alone waits for the kernel in front; the consumers write nothing before columns of x have come,
so not before that wait is over.  For a lossless weight's outliers all warps read x, after a wait of their own.

Of few rows each warp multiplies alone (warp_hopper.py), of more four warps multiply together (warpgroup_hopper.py).  This
module knows no model's shapes and chooses no tiles.

Shapes: M rows, K in, N out; a gated product has F = N, and its weight has 2F rows: gate rows first, then up rows.  J words of a
row of the weight, G groups of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from specdec.ops.hopper import tma_layout
from specdec.ops.launch import chained
from specdec.ops.products.formats.lossless import ALIGN_K, LosslessMatrix
from specdec.ops.products.formats.quantised import pack_factor_of
from specdec.ops.products.kernels.dense.stream_hopper import INTERLEAVE, groups_of, rows_of
from specdec.ops.products.kernels.dense.stream_triton import result_of
from specdec.ops.products.kernels.quantised.warp_hopper import quantised_warp_kernel
from specdec.ops.products.kernels.quantised.warpgroup_hopper import quantised_warpgroup_kernel
from specdec.ops.products.tiles.dense import two_pieces
from specdec.ops.products.tiles.quantised import PRODUCER_REGISTERS

if TYPE_CHECKING:
    from specdec.ops.products.formats.quantised import QuantisedMatrix
    from specdec.ops.products.tiles.quantised import QuantisedTiles


class _Operands(NamedTuple):
    """What the kernels read of a weight; tensors that it doesn't have are replaced by any other.

    pack_factor: values of 8 or 4 bits in a word.
    words_NJ: int16, all quantised values, or the 8 bits of a lossless weight.
    high_NJ: the 4 bits of a lossless weight.
    scales: scales and zero points, or a lossless weight's bases and starts, and its outliers' columns, bits and largest counts.
    """

    kind: str
    pack_factor: int
    words_NJ: Tensor
    high_NJ: Tensor
    scales: tuple[Tensor, ...]
    columns: int
    groups: int
    group_size: int
    has_zero_points: bool


def _operands(weight: QuantisedMatrix | LosslessMatrix) -> _Operands:
    if isinstance(weight, LosslessMatrix):
        words_NJ, high_NJ = weight.low_NJ.view(torch.int16), weight.high_NJ.view(torch.int16)
        return _Operands("lossless", 2, words_NJ, high_NJ, weight[2:], weight.columns, 1, 0, False)
    assert weight.zero_points_NG is None or weight.group_size
    words_NJ, scales_NG, zero_points_NG = weight.qweight_NJ.view(torch.int16), weight.scales_NG, weight.zero_points_NG
    scales = scales_NG, scales_NG if zero_points_NG is None else zero_points_NG, scales_NG, scales_NG, scales_NG
    return _Operands(
        weight.kind, pack_factor_of(weight.kind), words_NJ, words_NJ, scales, weight.columns, scales_NG.shape[1],
        weight.group_size, zero_points_NG is not None,
    )  # fmt: skip


def launch_quantised_hopper(
    x_MK: Tensor,
    weight: QuantisedMatrix | LosslessMatrix,
    bias_N: Tensor | None,
    gated: bool,
    tiles: QuantisedTiles,
    store_partials: bool = False,
) -> Tensor:
    """[M, N], or [M, F] if gated, in bfloat16.  Rows of x must start at multiples of 16 bytes, and N be a multiple of 8.

    store_partials: the result is [splits, M, N] float32, what each split has computed.
    """
    of = _operands(weight)
    (M, K), rows = x_MK.shape, len(of.words_NJ)
    N, parts = (rows // 2, 2) if gated else (rows, 1)
    is_warp = tiles.kernel == "warp_hopper"
    assert 0 < M and (M <= tiles.block_m or not is_warp) and of.columns == K and x_MK.stride(1) == 1 and N % INTERLEAVE == 0
    assert of.kind != "lossless" or K % ALIGN_K == 0
    assert x_MK.dtype == torch.bfloat16 and (bias_N is None or bias_N.shape == (rows,))
    num_tiles = triton.cdiv(rows, tiles.block_n) * triton.cdiv(M, tiles.block_m)
    assert not (store_partials and gated)
    y_MN, partials, arrivals = result_of(
        x_MK, N, tiles.splits, num_tiles * tiles.of_program, tiles.block_n // tiles.of_program, max(8, tiles.block_m),
        store_partials,
    )  # fmt: skip
    tensors = *of.scales, of.scales[0] if bias_N is None else bias_N, y_MN, partials, arrivals
    sizes = M, N, K, of.groups, x_MK.stride(0)
    common: dict[str, Any] = dict(
        KIND=of.kind, GROUP_SIZE=of.group_size, HAS_ZERO_POINTS=of.has_zero_points, BLOCK_M=two_pieces(tiles.block_m)[0],
        BLOCK_N=tiles.block_n // tiles.of_program, SPLITS=tiles.splits, STAGES=tiles.stages, PARTS=parts,
        STORE_PARTIALS=store_partials, HAS_BIAS=bias_N is not None, PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        maxnreg=tiles.registers, **chained(x_MK.device),
    )  # fmt: skip
    launch = _launch_warp if is_warp else _launch_warpgroup
    launch(x_MK, of, parts, tiles, (num_tiles, tiles.splits), (*tensors, *sizes), common)
    return y_MN


def _launch_warp(
    x_MK: Tensor, of: _Operands, parts: int, tiles: QuantisedTiles, grid: tuple[int, int], others: tuple[Any, ...],
    common: dict[str, Any],
) -> None:  # fmt: skip
    """Each consumer warp multiplies alone (mma).  others: the kernel's arguments from the scales on."""
    (M, K), width, slices = x_MK.shape, 64 * of.pack_factor, tiles.slices
    steps = triton.cdiv(K, tiles.block_k)
    assert of.group_size == 0 or (width % of.group_size == 0 and width // of.group_size <= 4), of.group_size
    assert tiles.block_k == slices * width and K % width == 0 and steps >= tiles.splits
    qweight_tiles = _slices_of(of.words_NJ, 64, parts, tiles.block_n, slices)
    high_tiles = _slices_of(of.high_NJ, 32, parts, tiles.block_n, slices) if of.kind == "lossless" else qweight_tiles
    shape, strides = [of.pack_factor, K // width, M, 64], [64, width, x_MK.stride(0), 1]
    block = [of.pack_factor, slices, tiles.block_m, 64]
    x_tiles = qweight_tiles if tiles.block_m == 1 else TensorDescriptor(x_MK, shape, strides, block, tma_layout(4))
    quantised_warp_kernel[grid](
        x_MK, x_tiles, qweight_tiles, high_tiles, *others, SLICES=slices, num_warps=tiles.warps,
        STEPS=triton.cdiv(steps, tiles.splits) if tiles.block_m == 1 else 0, **common,
    )  # fmt: skip


def _launch_warpgroup(
    x_MK: Tensor, of: _Operands, parts: int, tiles: QuantisedTiles, grid: tuple[int, int], others: tuple[Any, ...],
    common: dict[str, Any],
) -> None:  # fmt: skip
    """The four warps of a warpgroup multiply together (wgmma).  others: the kernel's arguments from the scales on."""
    is_lossless, slices, store_partials = of.kind == "lossless", tiles.slices, common["STORE_PARTIALS"]
    steps = triton.cdiv(x_MK.shape[1], tiles.block_k)
    assert of.group_size in (0, tiles.block_k // 2) or of.group_size % tiles.block_k == 0, of.group_size
    assert tiles.block_k % (ALIGN_K if is_lossless else 32 * of.pack_factor) == 0
    assert tiles.warps in (4, 8) and slices in (1, tiles.warps // 4) and steps // tiles.splits >= slices <= tiles.stages
    block_n, block_j = tiles.block_n // tiles.of_program, tiles.block_k // of.pack_factor
    qweight_tiles = groups_of(of.words_NJ, parts, block_n, block_j)
    high_tiles = groups_of(of.high_NJ, parts, block_n, block_j // 2) if is_lossless else qweight_tiles
    rows, more = two_pieces(tiles.block_m)  # the second piece has no counters of its own, and no outliers
    assert not more or (more & (more - 1) == 0 and slices == 1 and (store_partials or tiles.splits == 1) and not is_lossless)
    x_tiles = rows_of(x_MK, rows, tiles.block_k)
    more_tiles = rows_of(x_MK, more, tiles.block_k) if more else x_tiles
    quantised_warpgroup_kernel[grid](
        x_MK, x_tiles, more_tiles, qweight_tiles, high_tiles, *others, MORE_M=more, BLOCK_K=tiles.block_k,
        TILES=tiles.of_program, TURNS=slices, CONSUMER_REGISTERS=tiles.consumer_registers, num_warps=4, **common,
    )  # fmt: skip


def _slices_of(words_NJ: Tensor, width: int, parts: int, block_n: int, slices: int) -> TensorDescriptor:
    """`groups_of` in slices of `width` words, each of which lies in shared memory by itself."""
    rows, J = words_NJ.shape
    N, groups = rows // parts, block_n // parts // INTERLEAVE
    shape, strides = [J // width, N // INTERLEAVE, parts, INTERLEAVE, width], [width, INTERLEAVE * J, N * J, J, 1]
    return TensorDescriptor(words_NJ, shape, strides, [slices, groups, parts, INTERLEAVE, width], tma_layout(5, width))
