"""Which kernel multiplies with a dense weight, and its tiles, chosen by shapes alone.

The choices were measured on an H100 and, for the kernels of stream_hopper.py and gated_hopper.py, on an H200:
benchmarks/products/README.md, "Why the tiles and rules are what they are".  This module knows no tensor and no model.

Shapes: M rows, K in, N out.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Literal, NamedTuple

import torch

from specdec.ops.products.gpus import H100, H200, GpuKind

FEW = 64  # threshold in rows of x: up to this many, stream_triton.py's kernel is used, and large_n_triton.py's for more
STEP = 128  # columns of a step of invariant split-K products: splits begin at multiples of it
WHOLE_SM, HALF_SM = 229_000, 112_000  # bytes of shared memory for the stages of the only program of an SM, and of one of two
MIN_ROWS, MIN_COLUMNS = 2048, 1024  # thresholds: smaller weights have tiles for a small part of the SMs only
# With up to 8 rows of x fewer columns do: 5,120 x 768 (GLM-4.7-Flash's q_b) takes 4.6 us with a norm, 5.3 by the Triton kernel.
# With up to FEW still fewer do where a weight is so tall: 49,152 x 576 (SmolLM2-135M's) takes 20.2 us with 16 rows of x (24.4).
FEW_COLUMNS, FEWEST_COLUMNS, TALL = 768, 512, 8192
# Thresholds: products with so few rows of a weight, and so many columns, take Hopper's kernel in so many splits.  With 9 and 16
# rows of x, 1,024 x 4,096 takes 4.8 us on an H200 (11.0 by the Triton kernel), 256 x 4,096 4.2 (10.9).  With up to 8, weights
# of SMALL_ROWS_OF_8 and more: 1,344 x 2,048 (GLM-4.7-Flash's q_a and kv_a) takes 4.9 us with a norm (6.3).
SMALL_ROWS, SMALL_ROWS_OF_8, SMALL_COLUMNS, SMALL_SPLITS = 256, 1024, 2048, 4
# Thresholds in numbers of a weight: up to so many, registers hold it before x exists, and with fewer columns than FEW_COLUMNS
# larger ones, for up to 8 rows; up to so many, one row's product has about 64 programs.  MOST_WORDS: of a weight, 32 bits each,
# that a thread holds.
HELD_NUMBERS, SMALL_NUMBERS, MOST_WORDS = 1 << 21, 1 << 20, 96
# Thresholds for weights of up to HELD_NUMBERS and more than 16 rows of x: columns and rows of x up to which they were measured;
# rows of x above which tiled_triton.py's tiles are faster; and rows of the weight up to which stream_hopper.py's kernel would
# have too few tiles, so that registers hold it.
MOST_COLUMNS, MOST_SMALL, TILED_ABOVE, HELD_ROWS = 1536, 512, 192, 768
SMS, WAVE_FULL = 132, 0.8  # SMs of an H100; threshold: the share of SMs that must have work, on average over all waves
LARGE_M, LARGE_M_FULL = 512, 0.9  # thresholds for gated_hopper.py's kernel: rows of x, and that share

# files of kernels/dense/
Kernel = Literal[
    "stream_triton", "large_n_triton", "tiled_triton", "stream_hopper", "gated_hopper", "one_row_hopper", "held_rows_hopper"
]


class ProductTiles(NamedTuple):
    """Which kernel computes a product, and what one program of it works on.

    block_m: rows of x (padded).
    block_n: rows of the weight.
    block_k: columns of a step; for one_row_hopper, those that a warp loads side by side.
    splits: split-K: programs that share a tile's columns; for tiled_triton, parts that one program adds up one after the other.
    warps, stages: Triton's.
    """

    kernel: Kernel
    block_m: int
    block_n: int
    block_k: int
    splits: int
    warps: int
    stages: int

    def shared_bytes(self, itemsize: int) -> int:
        """Bytes of shared memory that the pipeline's stages take."""
        return self.stages * (self.block_m + self.block_n) * self.block_k * itemsize


_stream, _large_n = partial(ProductTiles, "stream_triton"), partial(ProductTiles, "large_n_triton")
_tiled, _hopper = partial(ProductTiles, "tiled_triton"), partial(ProductTiles, "stream_hopper")


@cache
def product_tiles(
    M: int, N: int, K: int, dtype: torch.dtype, gated: bool, kind: GpuKind = H100, partials: bool = False
) -> ProductTiles | None:
    """The kernel's tiles for M rows and a weight of N rows and K columns; None: cuBLAS is used.

    gated: whether the weight holds gate and up rows.  partials: whether a norm adds up split-K partials.
    kind: the kind of GPU.  Those of an H200 need a Hopper GPU, and rows of x that start at multiples of 16 bytes.
    """
    if kind == H200 and dtype != torch.float32 and N >= MIN_ROWS and K >= _least_columns(M, N):
        tiles = _tiles_hopper(M, N, K, gated, partials)
        if tiles is not None:
            return tiles
    if kind == H200 and dtype != torch.float32 and SMALL_ROWS <= N < MIN_ROWS and K >= SMALL_COLUMNS:
        is_few = 0 < M <= 8 and N >= SMALL_ROWS_OF_8
        if (is_few or 8 < M <= FEW) and not gated and N % 8 == 0 and K % 8 == 0:
            block_k = 256 if is_few else 128
            stage = (64 + padded_rows(M)) * block_k * 2
            return _hopper(padded_rows(M), 64, block_k, SMALL_SPLITS, 4, min(12, WHOLE_SM // stage))
    if kind == H200 and 0 < M <= 16 and dtype != torch.float32 and K % 8 == 0:
        held = _tiles_in_registers(M, N, K, gated)
        if held is not None:
            return held
    if kind == H200 and 16 < M <= MOST_SMALL and dtype != torch.float32 and N * K <= HELD_NUMBERS and K <= MOST_COLUMNS:
        if N % (16 if gated else 8) == 0 and K % 8 == 0 and (M <= TILED_ABOVE or N > HELD_ROWS):
            return _tiles_of_small(M, N, K)
    if not 0 < M <= FEW:
        return _tiles_large_m(M, N, dtype, gated)
    block_m = max(8, 1 << (M - 1).bit_length())
    if dtype == torch.float32:
        return _tiles_float32(M, N, K)
    large_n = N >= 16384
    if M <= 16:
        if large_n and M <= 8:
            return _stream(block_m, 32, 512, 1, 4, 3)
        if N < 4096:
            return _stream(block_m, 16, 256, -(-K // 4096), 2, 4)
        if large_n or K <= 8192:
            return _stream(block_m, 64, 256, 1, 4, 4)
        return _stream(block_m, 64, 128, 4, 4, 6) if M <= 8 else _stream(block_m, 64, 256, 2, 4, 4)
    if large_n:
        stages = 4 if M <= 32 else 3
        return _stream(block_m, 64, 128, 1, 4, stages) if gated else _stream(block_m, 128, 128, 1, 8, stages)
    if N < 4096:
        return _stream(block_m, 64, 128, -(-K // 2048), 4, 5)
    splits = -(-K // 8192)
    return _stream(block_m, 64, 128, splits, 4, 7 if -(-N // 64) * splits <= 64 else 5)


def _least_columns(M: int, N: int) -> int:
    """Of weights that stream_hopper.py's kernel was measured to multiply faster than the others."""
    if M <= 8:
        return FEW_COLUMNS
    return FEWEST_COLUMNS if M <= FEW and N >= TALL else MIN_COLUMNS


def _tiles_in_registers(M: int, N: int, K: int, gated: bool) -> ProductTiles | None:
    """Those of one_row_hopper.py's or held_rows_hopper.py's kernel, for weights that stream_hopper.py's does not take.

    None: a thread's registers do not hold its part of the weight, or another kernel is as fast.
    """
    parts = 2 if gated else 1
    if M == 1:
        if K >= FEW_COLUMNS and N * K > HELD_NUMBERS:
            return None
        tiles = one_row_tiles(N // parts, K, parts)
        return tiles if parts * _words(tiles, K) <= MOST_WORDS else None
    if N * K > HELD_NUMBERS and (M > 8 or K >= FEW_COLUMNS):
        return None
    rows = 32 if M > 8 and N >= 960 and K < FEW_COLUMNS else 16
    for warps in (4, 8) if N * K <= HELD_NUMBERS else (2,):
        if -(-K // (32 * warps)) * rows // 2 <= MOST_WORDS:
            return ProductTiles("held_rows_hopper", 8 if M <= 8 else 16, rows, 32, 1, warps, 1)
    return None


def _tiles_of_small(M: int, N: int, K: int) -> ProductTiles:
    """Small weights and more rows of x than one tile in registers has: nobody waits for bytes, so what counts is the path from
    the wait to the result.  Columns are not shared out, and all of them are on their way at once where an SM has the room.
    """
    if M > TILED_ABOVE:
        return _tiled(64, 128, 64, 1, 4, 4)
    if N <= HELD_ROWS:
        warps = next(warps for warps in (2, 4, 8) if -(-K // (32 * warps)) * 16 // 2 <= MOST_WORDS)
        return ProductTiles("held_rows_hopper", 16, 16, 32, 1, warps, 1)
    tiles_m = -(-M // 128)
    block_m = padded_rows(M) if tiles_m == 1 else 32 * -(-M // (32 * tiles_m))
    stages = min(max(2, -(-K // 128)), WHOLE_SM // ((64 + block_m) * 256))
    return _hopper(block_m, 64, 128, 1, 4, stages)


def one_row_tiles(N: int, K: int, parts: int) -> ProductTiles:
    """For N outputs of so many rows each.  A smaller weight has fewer programs: a program's start and end take longer than its
    reads."""
    small, warps = parts * N * K <= SMALL_NUMBERS, 8 if N >= MIN_ROWS else 4
    if K >= 1024:
        return ProductTiles("one_row_hopper", 1, 2 * warps if small else warps, 256, 1, warps, 1)
    block_k = 64 if small and N >= 960 else 128
    return ProductTiles("one_row_hopper", 1, warps * 256 // block_k, block_k, 1, warps, 1)


def _words(tiles: ProductTiles, K: int) -> int:
    """32 bits each, that a thread of one_row_hopper.py's kernel holds of the weight; of one of a gated product's two rows."""
    return 4 * -(-K // tiles.block_k) * tiles.block_n * tiles.block_k // (tiles.warps * 256)


def padded_rows(M: int) -> int:
    """Rows of a tile of x in stream_hopper.py's kernel for M rows: tiles with many missing rows were slower."""
    return 48 if 32 < M <= 48 else max(8, 1 << (M - 1).bit_length())


def two_pieces(rows: int) -> tuple[int, int]:
    """A tile's rows of x as tensors hold them: the largest power of two in them, and the rest, which is one too, or 0."""
    low = 1 << (rows.bit_length() - 1)
    return low, rows - low


def _tiles_hopper(M: int, N: int, K: int, gated: bool, partials: bool) -> ProductTiles | None:
    """Tiles of stream_hopper.py's or gated_hopper.py's kernel in 16 bits; None where neither can run or was found to be faster.

    Where there are fewer tiles than SMs, programs share a tile's columns so that nearly every SM has one program, which takes
    all of its shared memory; elsewhere two programs share an SM, unless few would be left for the last wave.  Where there is a
    tile for more than half of the SMs, and three for each two at most, three programs share a tile and two an SM, if the caller
    adds up partials.  Measured: benchmarks/products/README.md, "Why the tiles and rules are what they are".
    """
    if N % (16 if gated else 8) or K % 8:
        return None
    if M > LARGE_M and gated and N >= 16384 and _fills_waves(-(-N // 256) * -(-M // 128), LARGE_M_FULL):
        return ProductTiles("gated_hopper", 128, 256, 64, 1, 4, 4)
    if M > FEW:
        programs = 2 * -(-N // 64)  # cuBLAS can't start early, and adds up what they share itself
        if partials and M <= 192 and programs <= SMS and _fills_waves(programs, LARGE_M_FULL):
            block_m = 32 * max(3, -(-M // 32))
            return _hopper(block_m, 64, 64, 2, 4, WHOLE_SM // ((64 + block_m) * 128))
        if not (192 < M <= 256 and gated and N >= 16384 and _fills_waves(-(-N // 128) * -(-M // 256))):
            return None
        return _hopper(256, 128, 64, 1, 8, 4)
    if M == 0:
        return None
    block_m, block_k = padded_rows(M), 256 if M <= 8 else 128
    tiles, stage = -(-N // 64), (64 + block_m) * block_k * 2
    splits = min(max(1, SMS // tiles), -(-K // (2 * block_k)))
    room = HALF_SM if tiles > SMS and not (gated and 0 < tiles % (2 * SMS) <= SMS // 2) else WHOLE_SM
    if partials and SMS < 2 * tiles and 3 * tiles <= 2 * SMS and (M <= 8 or K > 8192):
        splits, room = 3, HALF_SM
    return _hopper(block_m, 64, block_k, splits, 4, min(12, room // stage))


def _tiles_large_m(M: int, N: int, dtype: torch.dtype, gated: bool) -> ProductTiles | None:
    """More than 64 rows: large_n_triton.py's tiles for large N, up to 128 rows, or 192 if gated; None: cuBLAS.

    Measured: benchmarks/products/README.md, "Why the tiles and rules are what they are".
    """
    if not FEW < M <= (192 if gated else 128) or dtype == torch.float32 or N < 16384:
        return None
    tiles = _large_n(96 if M <= 96 else 128, 128, 64, 1, 4, 5)
    if M > 128:
        tiles = _large_n(160 if M <= 160 else 192, 256, 64, 1, 8, 4)
    return tiles if _fills_waves(-(-N // tiles.block_n)) else None


def _fills_waves(programs: int, share: float = WAVE_FULL) -> bool:
    """Whether so many programs, one an SM, give work to that share of all SMs, on average over all waves."""
    return programs >= share * SMS * -(-programs // SMS)


def _tiles_float32(M: int, N: int, K: int) -> ProductTiles | None:
    """float32: without tensor cores the kernel is faster than cuBLAS only for small weights, as the shipped pair has them.

    Measured: benchmarks/products/README.md, "Why the tiles and rules are what they are".
    """
    if not 1 < M <= 16 or N > 1536 or K > 1024:
        return None
    return _stream(8 if M <= 8 else 16, 16, 32, min(8, -(-K // 32)), 2, 3)


@cache
def invariant_tiles(M: int, N: int, K: int, gated: bool) -> ProductTiles:
    """Tiles by which a row's result does not depend on M, bit for bit, in bfloat16 and float16 on Hopper.

    An element is a sum over columns.  Its order is fixed by two things: the splits, which here depend on the weight's shape
    alone; and the tensor cores' instruction, which adds up 16 columns at a time.  At least 64 weight rows, 16 rows of x and 4
    warps a program make it the same one (wgmma) for any number of rows.  Other sizes of tiles don't matter.
    """
    splits = -(-K // 2048) if N < 4096 else 1 if N >= 16384 else -(-K // 8192)
    if M > FEW:
        tiles = _tiles_large_m(M, N, torch.bfloat16, gated) if splits == 1 else None
        return tiles or _tiles_of_rows(M, N, splits)
    block_m = max(16, 1 << (M - 1).bit_length())
    if splits > 1:
        return _stream(block_m, 64, STEP, splits, 4, 6 if M <= 16 else 5)
    if M <= 16:
        return _stream(block_m, 64, 256, 1, 4, 4)
    if N >= 16384:
        stages = 4 if M <= 32 else 3
        return _stream(block_m, 64, 128, 1, 4, stages) if gated else _stream(block_m, 128, 128, 1, 8, stages)
    return _stream(block_m, 64, 128, 1, 4, 7 if N <= 4096 else 5)


def _tiles_of_rows(M: int, N: int, splits: int) -> ProductTiles:
    """Tiles of tiled_triton.py's kernel: large ones where they fill the GPU, else small ones.

    Where every SM gets one small tile at most, the tile has as few rows as that allows: it takes all of the SM's shared memory,
    and more SMs read the weight.
    """
    if -(-N // 256) * -(-M // 128) >= WAVE_FULL * SMS:
        return _tiled(128, 256, 64, splits, 8, 4)
    for rows, block_k, stages in ((32, 128, 5), (64, 128, 4), (128, 64, 6)):
        if -(-N // 128) * -(-M // rows) <= SMS:
            return _tiled(rows, 128, block_k, splits, 4, stages)
    return _tiled(64 if M <= 128 else 128, 128, 64, splits, 4, 4)
