"""The product of few rows with a weight of 8 or 4 bits, or a packed one, written in Gluon for Hopper GPUs.

Its two kernels are ops/products/kernels/dense/stream_hopper.py's, whose docstring explains the order of loads and waits, over
codes instead of numbers: the copy engine (TMA) fills all stages with codes before the product's input exists.  Codes go from
shared memory to registers, are converted there to bfloat16, in which every code is exact, and are the first operand of the
tensor cores.  Scales multiply float32 sums.  So nothing is rounded before the end.

- A scale for each row is applied once, to the complete sum.
- A packed weight (ops/products/formats/lossless.py) has codes of 8 bits and of 4 in stages of their own, and no scales.
- Scales for groups of columns, and zeros, are read into registers a step ahead, the first before the wait, since no kernel
  writes them.  A group's sum is multiplied by its scale.

One warp of a program only loads, and has its registers taken away for the others' sake.  A stage has barriers for its codes
and for its columns, which say that they are there, and one that says that they were read.  Where that warp loads x, it alone
waits for the kernel in front; the others write nothing before columns of x have come, so not before that wait is over.  Of a
packed weight's far numbers all warps read x, after a wait of their own.

Of few rows each warp multiplies alone (warp_hopper.py), of more four warps multiply together (warpgroup_hopper.py).  This
module knows no model's shapes and chooses no tiles.

Shapes: T rows, I in, O out; a gated product has F = O, and its weight has 2F rows: gate rows first, then up rows.  J words of a
row of codes, G groups of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from specdec.ops.hopper import tma_layout
from specdec.ops.launch import chained
from specdec.ops.products.formats.lossless import WIDTH, Packed
from specdec.ops.products.formats.quantised import pack_factor_of
from specdec.ops.products.kernels.dense.stream_hopper import EIGHT, groups_of, rows_of
from specdec.ops.products.kernels.dense.stream_triton import result_of
from specdec.ops.products.kernels.quantised.warp_hopper import quantised_sliced_kernel
from specdec.ops.products.kernels.quantised.warpgroup_hopper import quantised_hopper_kernel
from specdec.ops.products.tiles.dense import two_parts
from specdec.ops.products.tiles.quantised import LOADER

if TYPE_CHECKING:
    from specdec.ops.products.formats.quantised import QuantisedMatrix
    from specdec.ops.products.tiles.quantised import QuantisedTiles


class _Planes(NamedTuple):
    """What the kernels read of a weight; planes that it doesn't have are replaced by any other.

    a_word: codes of 8 or 4 bits in a word.
    words_OJ: int16, all codes, or a packed weight's 8 bits.
    high_OJ: a packed weight's 4 bits.
    scales: scales and zeros, or a packed weight's bases and starts, and its far numbers' columns, bits and largest counts.
    """

    kind: str
    a_word: int
    words_OJ: Tensor
    high_OJ: Tensor
    scales: tuple[Tensor, ...]
    columns: int
    groups: int
    group: int
    has_zero_points: bool


def _planes(weight: QuantisedMatrix | Packed) -> _Planes:
    if isinstance(weight, Packed):
        words_OJ, high_OJ = weight.low_OJ.view(torch.int16), weight.high_OJ.view(torch.int16)
        return _Planes("packed", 2, words_OJ, high_OJ, weight[2:], weight.columns, 1, 0, False)
    assert weight.zero_points_NG is None or weight.group
    words_OJ, scales_NG, has_zero_points = (
        weight.qweight_NJ.view(torch.int16),
        weight.scales_NG,
        weight.zero_points_NG is not None,
    )
    scales = scales_NG, scales_NG if weight.zero_points_NG is None else weight.zero_points_NG, scales_NG, scales_NG, scales_NG
    return _Planes(
        weight.kind, pack_factor_of(weight.kind), words_OJ, words_OJ, scales, weight.columns, scales_NG.shape[1], weight.group,
        has_zero_points,
    )  # fmt: skip


def launch_quantised_hopper(
    x_TI: Tensor,
    weight: QuantisedMatrix | Packed,
    bias_O: Tensor | None,
    gated: bool,
    tiles: QuantisedTiles,
    leaves: bool = False,
) -> Tensor:
    """[T, O], or [T, F] if gated, in bfloat16.  Rows of x must start at multiples of 16 bytes, and O be one of 8.

    leaves: the result is [splits, T, O] float32, what each split has computed.
    """
    of = _planes(weight)
    (T, I), rows = x_TI.shape, len(of.words_OJ)
    O, parts = (rows // 2, 2) if gated else (rows, 1)
    is_warp = tiles.kernel == "warp_hopper"
    assert 0 < T and (T <= tiles.block_m or not is_warp) and of.columns == I and x_TI.stride(1) == 1 and O % EIGHT == 0
    assert of.kind != "packed" or I % WIDTH == 0
    assert x_TI.dtype == torch.bfloat16 and (bias_O is None or bias_O.shape == (rows,))
    num_tiles = triton.cdiv(rows, tiles.block_n) * triton.cdiv(T, tiles.block_m)
    assert not (leaves and gated)
    y_TO, partials, arrivals = result_of(
        x_TI, O, tiles.splits, num_tiles * tiles.of_program, tiles.block_n // tiles.of_program, max(8, tiles.block_m), leaves
    )
    planes = *of.scales, of.scales[0] if bias_O is None else bias_O, y_TO, partials, arrivals
    sizes = T, O, I, of.groups, x_TI.stride(0)
    common: dict[str, Any] = dict(
        KIND=of.kind, GROUP=of.group, HAS_ZEROS=of.has_zero_points, ROWS=two_parts(tiles.block_m)[0],
        BLOCK_O=tiles.block_n // tiles.of_program, SPLITS=tiles.splits, STAGES=tiles.stages, PARTS=parts,
        LEAVES=leaves, HAS_BIAS=bias_O is not None, LOADER=LOADER, maxnreg=tiles.registers, **chained(x_TI.device),
    )  # fmt: skip
    launch = _launch_warp if is_warp else _launch_warpgroup
    launch(x_TI, of, parts, tiles, (num_tiles, tiles.splits), (*planes, *sizes), common)
    return y_TO


def _launch_warp(
    x_TI: Tensor, of: _Planes, parts: int, tiles: QuantisedTiles, grid: tuple[int, int], others: tuple[Any, ...],
    common: dict[str, Any],
) -> None:  # fmt: skip
    """Each warp multiplies alone.  others: the kernel's arguments from the scales on."""
    (T, I), width, slices = x_TI.shape, 64 * of.a_word, tiles.slices
    steps = triton.cdiv(I, tiles.block_k)
    assert of.group == 0 or (width % of.group == 0 and width // of.group <= 4), of.group
    assert tiles.block_k == slices * width and I % width == 0 and steps >= tiles.splits
    codes = _slices_of(of.words_OJ, 64, parts, tiles.block_n, slices)
    highs = _slices_of(of.high_OJ, 32, parts, tiles.block_n, slices) if of.kind == "packed" else codes
    shape, strides = [of.a_word, I // width, T, 64], [64, width, x_TI.stride(0), 1]
    block = [of.a_word, slices, tiles.block_m, 64]
    x_tiles = codes if tiles.block_m == 1 else TensorDescriptor(x_TI, shape, strides, block, tma_layout(4))
    quantised_sliced_kernel[grid](
        x_TI, x_tiles, codes, highs, *others, SLICES=slices, num_warps=tiles.warps,
        STEPS=triton.cdiv(steps, tiles.splits) if tiles.block_m == 1 else 0, **common,
    )  # fmt: skip


def _launch_warpgroup(
    x_TI: Tensor, of: _Planes, parts: int, tiles: QuantisedTiles, grid: tuple[int, int], others: tuple[Any, ...],
    common: dict[str, Any],
) -> None:  # fmt: skip
    """Four warps multiply together.  others: the kernel's arguments from the scales on."""
    is_packed, slices, leaves = of.kind == "packed", tiles.slices, common["LEAVES"]
    steps = triton.cdiv(x_TI.shape[1], tiles.block_k)
    assert of.group in (0, tiles.block_k // 2) or of.group % tiles.block_k == 0, of.group
    assert tiles.block_k % (WIDTH if is_packed else 32 * of.a_word) == 0
    assert tiles.warps in (4, 8) and slices in (1, tiles.warps // 4) and steps // tiles.splits >= slices <= tiles.stages
    block_n, block_j = tiles.block_n // tiles.of_program, tiles.block_k // of.a_word
    codes = groups_of(of.words_OJ, parts, block_n, block_j)
    highs = groups_of(of.high_OJ, parts, block_n, block_j // 2) if is_packed else codes
    rows, more = two_parts(tiles.block_m)  # the second part has no counters of its own, and no far numbers
    assert not more or (more & (more - 1) == 0 and slices == 1 and (leaves or tiles.splits == 1) and not is_packed)
    x_tiles = rows_of(x_TI, rows, tiles.block_k)
    more_tiles = rows_of(x_TI, more, tiles.block_k) if more else x_tiles
    quantised_hopper_kernel[grid](
        x_TI, x_tiles, more_tiles, codes, highs, *others, MORE=more, BLOCK_I=tiles.block_k, TILES=tiles.of_program,
        TURNS=slices, OTHERS=tiles.others, num_warps=4, **common,
    )  # fmt: skip


def _slices_of(words_OJ: Tensor, width: int, parts: int, block_n: int, slices: int) -> TensorDescriptor:
    """`groups_of` in slices of `width` words, each of which lies in shared memory by itself."""
    rows, J = words_OJ.shape
    O, groups = rows // parts, block_n // parts // EIGHT
    shape, strides = [J // width, O // EIGHT, parts, EIGHT, width], [width, EIGHT * J, O * J, J, 1]
    return TensorDescriptor(words_OJ, shape, strides, [slices, groups, parts, EIGHT, width], tma_layout(5, width))
