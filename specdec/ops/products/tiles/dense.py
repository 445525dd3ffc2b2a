"""The tiles of the products' kernels, chosen by shapes alone.

The choices were measured on an H100 and, for the kernels of stream_hopper.py and gated_hopper.py, on an H200:
benchmarks/products/README.md, "Why the tiles and rules are what they are".  This module knows no tensor and no model.

Shapes: T rows, I in, O out.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from specdec.ops.products.gpus import H100, H200, Kind

FEW = 64  # threshold in rows of x: up to this many, stream_triton.py's kernel is used, and wide_triton.py's for more
STEP = 128  # columns of a step of invariant products whose columns are split: borders of splits are multiples of it
WHOLE_SM, HALF_SM = 229_000, 112_000  # bytes of shared memory for the stages of the only program of an SM, and of one of two
LEAST_ROWS, LEAST_COLUMNS = 2048, 1024  # thresholds: smaller weights have tiles for a small part of the SMs only
SMS, WAVE_FULL = 132, 0.8  # SMs of an H100; threshold: the share of SMs that must have work, on average over all waves
MANY, MANY_FULL = 512, 0.9  # thresholds for gated_hopper.py's kernel: rows of x, and that share


class ProductTiles(NamedTuple):
    """What one program of a product kernel works on.

    block_t: rows of x (padded).
    block_o: rows of the weight.
    block_i: columns of a step.
    splits: programs that share a tile's columns.
    warps, stages: Triton's.
    columns: of a split, for tiled_triton.py's kernel, which takes any number of rows; 0 for the other kernels.
    lag: for stream_hopper.py's kernel, how many steps the tensor cores may be late: 0 fills each stage again at once, and 1
        keeps the tensor cores busy; -1 for the other kernels.
    fetchers: groups of warps that only ask for tiles: 1 for gated_hopper.py's kernel, 0 for the others.
    """

    block_t: int
    block_o: int
    block_i: int
    splits: int
    warps: int
    stages: int
    columns: int = 0
    lag: int = -1
    fetchers: int = 0

    def shared_bytes(self, itemsize: int) -> int:
        """Bytes of shared memory that the pipeline's stages take."""
        return self.stages * (self.block_t + self.block_o) * self.block_i * itemsize


class StackedTiles(NamedTuple):
    """What one program of stacked_triton.py's kernels works on; the names are those of ProductTiles."""

    block_t: int
    block_o: int
    block_i: int
    warps: int
    stages: int


@cache
def product_tiles(
    T: int, O: int, I: int, dtype: torch.dtype, gated: bool, kind: Kind = H100, terms: bool = False
) -> ProductTiles | None:
    """The kernel's tiles for T rows and a weight of O rows and I columns; None: cuBLAS is used.

    gated: whether the weight holds gate and up rows.  terms: whether a norm adds up what programs that share columns computed.
    kind: the kind of GPU.  Those of an H200 need a Hopper GPU, and rows of x that start at multiples of 16 bytes.
    """
    if kind == H200 and dtype != torch.float32 and O >= LEAST_ROWS and I >= LEAST_COLUMNS:
        tiles = _tiles_hopper(T, O, I, gated, terms)
        if tiles is not None:
            return tiles
    if not 0 < T <= FEW:
        return _tiles_many(T, O, dtype, gated)
    block_t = max(8, 1 << (T - 1).bit_length())
    if dtype == torch.float32:
        return _tiles_float32(T, O, I)
    wide = O >= 16384
    if T <= 16:
        if wide and T <= 8:
            return ProductTiles(block_t, 32, 512, 1, 4, 3)
        if O < 4096:
            return ProductTiles(block_t, 16, 256, -(-I // 4096), 2, 4)
        if wide or I <= 8192:
            return ProductTiles(block_t, 64, 256, 1, 4, 4)
        return ProductTiles(block_t, 64, 128, 4, 4, 6) if T <= 8 else ProductTiles(block_t, 64, 256, 2, 4, 4)
    if wide:
        stages = 4 if T <= 32 else 3
        return ProductTiles(block_t, 64, 128, 1, 4, stages) if gated else ProductTiles(block_t, 128, 128, 1, 8, stages)
    if O < 4096:
        return ProductTiles(block_t, 64, 128, -(-I // 2048), 4, 5)
    splits = -(-I // 8192)
    return ProductTiles(block_t, 64, 128, splits, 4, 7 if -(-O // 64) * splits <= 64 else 5)


def padded_rows(T: int) -> int:
    """Rows of a tile of x in stream_hopper.py's kernel for T rows: tiles with many missing rows were slower."""
    return 48 if 32 < T <= 48 else max(8, 1 << (T - 1).bit_length())


def two_parts(rows: int) -> tuple[int, int]:
    """A tile's rows of x as tensors hold them: the largest power of two in them, and the rest, which is one too, or 0."""
    low = 1 << (rows.bit_length() - 1)
    return low, rows - low


def _tiles_hopper(T: int, O: int, I: int, gated: bool, terms: bool) -> ProductTiles | None:
    """Tiles of stream_hopper.py's or gated_hopper.py's kernel in 16 bits; None where neither can run or was found to be faster.

    Where there are fewer tiles than SMs, programs share a tile's columns so that nearly every SM has one program, which takes
    all of its shared memory; elsewhere two programs share an SM.  Measured: benchmarks/products/README.md, "Why the tiles and
    rules are what they are".
    """
    if O % (16 if gated else 8) or I % 8:
        return None
    if T > MANY and gated and O >= 16384 and _fills_waves(-(-O // 256) * -(-T // 128), MANY_FULL):
        return ProductTiles(128, 256, 64, 1, 4, 4, fetchers=1)
    if T > FEW:
        programs = 2 * -(-O // 64)  # cuBLAS can't start early, and adds up what they share itself
        if terms and T <= 192 and programs <= SMS and _fills_waves(programs, MANY_FULL):
            block_t = 32 * max(3, -(-T // 32))
            return ProductTiles(block_t, 64, 64, 2, 4, WHOLE_SM // ((64 + block_t) * 128), lag=1)
        if not (192 < T <= 256 and gated and O >= 16384 and _fills_waves(-(-O // 128) * -(-T // 256))):
            return None
        return ProductTiles(256, 128, 64, 1, 8, 4, lag=1)
    if T == 0:
        return None
    block_t, block_i = padded_rows(T), 256 if T <= 8 else 128
    tiles, stage = -(-O // 64), (64 + block_t) * block_i * 2
    splits = min(max(1, SMS // tiles), -(-I // (2 * block_i)))
    room = HALF_SM if tiles > SMS else WHOLE_SM
    return ProductTiles(block_t, 64, block_i, splits, 4, min(12, room // stage), lag=0 if T <= 16 else 1)


def _tiles_many(T: int, O: int, dtype: torch.dtype, gated: bool) -> ProductTiles | None:
    """More than 64 rows: the wide kernel's tiles for a gated pair, and up to 128 rows for any wide weight; None: cuBLAS.

    Measured: benchmarks/products/README.md, "Why the tiles and rules are what they are".
    """
    if not FEW < T <= (192 if gated else 128) or dtype == torch.float32 or O < 16384:
        return None
    tiles = ProductTiles(96 if T <= 96 else 128, 128, 64, 1, 4, 5)
    if T > 128:
        tiles = ProductTiles(160 if T <= 160 else 192, 256, 64, 1, 8, 4)
    return tiles if _fills_waves(-(-O // tiles.block_o)) else None


def _fills_waves(programs: int, share: float = WAVE_FULL) -> bool:
    """Whether so many programs, one an SM, give work to that share of all SMs, on average over all waves."""
    return programs >= share * SMS * -(-programs // SMS)


def _tiles_float32(T: int, O: int, I: int) -> ProductTiles | None:
    """float32: without tensor cores the kernel is faster than cuBLAS only for small weights, as the shipped pair has them.

    Measured: benchmarks/products/README.md, "Why the tiles and rules are what they are".
    """
    if not 1 < T <= 16 or O > 1536 or I > 1024:
        return None
    return ProductTiles(8 if T <= 8 else 16, 16, 32, min(8, -(-I // 32)), 2, 3)


@cache
def invariant_tiles(T: int, O: int, I: int, gated: bool) -> ProductTiles:
    """Tiles by which a row's result does not depend on T, bit for bit, in bfloat16 and float16 on Hopper.

    An element is a sum over columns.  Its order is fixed by two things: the splits, which here depend on the weight's shape
    alone; and the tensor cores' instruction, which adds up 16 columns at a time.  At least 64 weight rows, 16 rows of x and 4
    warps a program make it the same one (wgmma) for any number of rows.  Other sizes of tiles don't matter.
    """
    splits = -(-I // 2048) if O < 4096 else 1 if O >= 16384 else -(-I // 8192)
    if T > FEW:
        many = _tiles_many(T, O, torch.bfloat16, gated) if splits == 1 else None
        return many or _tiles_of_rows(T, O, I, splits)
    block_t = max(16, 1 << (T - 1).bit_length())
    if splits > 1:
        return ProductTiles(block_t, 64, STEP, splits, 4, 6 if T <= 16 else 5)
    if T <= 16:
        return ProductTiles(block_t, 64, 256, 1, 4, 4)
    if O >= 16384:
        stages = 4 if T <= 32 else 3
        return ProductTiles(block_t, 64, 128, 1, 4, stages) if gated else ProductTiles(block_t, 128, 128, 1, 8, stages)
    return ProductTiles(block_t, 64, 128, 1, 4, 7 if O <= 4096 else 5)


def invariant_stacked_tiles(rows: int) -> StackedTiles:
    """Tiles for a stack of matrices with about `rows` rows of x each.  The order of sums is that of `invariant_tiles`."""
    if rows <= 32:
        return StackedTiles(16 if rows <= 16 else 32, 64, 128, 4, 4)
    return StackedTiles(64, 128, 64, 4, 4) if rows <= 64 else StackedTiles(128, 128, 64, 8, 4)


def _tiles_of_rows(T: int, O: int, I: int, splits: int) -> ProductTiles:
    """Tiles of tiled_triton.py's kernel: large ones where they fill the GPU, else small ones.

    Where every SM gets one small tile at most, the tile has as few rows as that allows: it takes all of the SM's shared memory,
    and more SMs read the weight.
    """
    steps = -(-I // STEP)
    columns = -(-steps // splits) * STEP
    if -(-O // 256) * -(-T // 128) >= WAVE_FULL * SMS:
        return ProductTiles(128, 256, 64, splits, 8, 4, columns)
    for rows, block_i, stages in ((32, 128, 5), (64, 128, 4), (128, 64, 6)):
        if -(-O // 128) * -(-T // rows) <= SMS:
            return ProductTiles(rows, 128, block_i, splits, 4, stages, columns)
    return ProductTiles(64 if T <= 128 else 128, 128, 64, splits, 4, 4, columns)
