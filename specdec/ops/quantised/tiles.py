"""The tiles of products with weights of 8 or 4 bits, chosen by shapes alone.

Those of up to 16 rows were measured on an H200, for one row: benchmarks/README.md, "Weights in 8 and 4 bits".  Of those for
more rows, wide 8-bit weights' alone were.  This module knows no tensor and no model.

Shapes: T rows, I in, O out.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from specdec.ops.products.tiles import SMS, ProductTiles
from specdec.ops.quantised.codes import Kind, codes_a_word

MOST_TILES = 1024  # of a split product: as many as there are counters of arrivals
FEW = 64  # threshold in rows of x: more are left to cuBLAS
WIDE, LONG = 16384, 8192  # thresholds in rows and in columns of the weight
SHARED = 227_000  # bytes of shared memory that all programs of an SM may have
CHUNK = 32  # groups whose scales a program of a Hopper kernel loads at once


class HopperTiles(NamedTuple):
    """What one program of linear_hopper.py's kernels works on.

    block_t: rows of x (padded).
    block_o: rows of the weight.
    block_i: columns of a step.
    splits: programs that share a tile's columns.
    warps: Triton's.
    stages: steps whose codes are in shared memory at one time.
    slices: groups of warps that take different columns of a step, each warp multiplying alone; 0: four warps multiply
        together, and all take the same columns.
    """

    block_t: int
    block_o: int
    block_i: int
    splits: int
    warps: int
    stages: int
    slices: int


@cache
def hopper_tiles(T: int, O: int, I: int, kind: Kind, group: int, zeros: bool, gated: bool) -> HopperTiles | None:
    """Tiles of linear_hopper.py's kernels for T rows and a weight of O rows (gate's and up's) and I columns; None: another one.

    group: columns of a scale, 0: all.  zeros: whether there are zeros.
    """
    width = 64 * codes_a_word(kind)  # columns of 128 bytes
    if not 0 < T <= FEW or O % (16 if gated else 8) or I % width or (group and (group % 64 or width % group)):
        return None
    if zeros and not group:
        return None
    block_t = 1 if T == 1 else max(8, 1 << (T - 1).bit_length())
    slices = 1 if block_t <= 16 else 0
    block_i = width if slices else 256 if group % 128 == 0 else 128
    block_o = 128 if O >= WIDE else 64
    tiles = _parts(O, block_o)
    splits = min(max(1, (3 if slices else 2) * SMS // tiles), _parts(I, 2 * block_i)) if tiles <= MOST_TILES else 1
    stage = 2 * block_i * (block_o // codes_a_word(kind) + (block_t if block_t > 1 else 0))
    kept = 4 * block_o * kept_groups(I, group, block_i, splits) * (1 + zeros) + (2 * _parts(I, splits) if block_t == 1 else 0)
    room = SHARED // min(4, _parts(tiles * splits, SMS))
    stages = max(2, min(12, (room - kept - 3000) // stage))
    return HopperTiles(block_t, block_o, block_i, splits, block_o // 16, stages, slices)


def kept_groups(columns: int, group: int, block_i: int, splits: int) -> int:
    """Groups whose scales such a program keeps in shared memory: all that its columns can touch, in whole chunks."""
    if not group:
        return 0
    steps = _parts(_parts(columns, block_i), splits)
    return _parts(_parts(steps * block_i, group) + (block_i % group > 0), CHUNK) * CHUNK


def _parts(whole: int, size: int) -> int:
    return -(-whole // size)


@cache
def quantised_tiles(T: int, O: int, I: int, kind: Kind) -> ProductTiles | None:
    """The kernel's tiles for T rows and a weight of O rows and I columns; None: the weight is converted, and cuBLAS is used."""
    if not 0 < T <= FEW:
        return None
    block_t = max(8, 1 << (T - 1).bit_length())
    few = _of_4_bits if codes_a_word(kind) == 4 else _of_8_bits
    tiles = few(block_t, O, I) if block_t <= 16 else _of_more_rows(block_t, O, I, kind)
    count = -(-O // tiles.block_o)
    splits = tiles.splits if count <= MOST_TILES else 1
    return tiles._replace(splits=min(splits, -(-I // tiles.block_i)))


def _of_8_bits(block_t: int, O: int, I: int) -> ProductTiles:
    if O >= WIDE:
        return ProductTiles(block_t, 128, 256, 1, 8, 3)
    if I > LONG:
        return ProductTiles(block_t, 64, 256, 4, 2, 5)
    return ProductTiles(block_t, 32, 256, 4, 2, 5) if O <= 4096 else ProductTiles(block_t, 64, 256, 1, 4, 5)


def _of_4_bits(block_t: int, O: int, I: int) -> ProductTiles:
    if O < WIDE and I > LONG:
        return ProductTiles(block_t, 32, 256, 4, 2, 3)
    return ProductTiles(block_t, 32, 256, 2 if O <= 4096 else 1, 2, 6)


def _of_more_rows(block_t: int, O: int, I: int, kind: Kind) -> ProductTiles:
    """17 to 64 rows.  Splits give every SM a program or two."""
    if O >= WIDE and codes_a_word(kind) == 2 and block_t <= 32:
        return ProductTiles(block_t, 128, 256, 1, 8, 3)
    return ProductTiles(block_t, 64, 128, min(4, max(1, 2 * SMS // -(-O // 64))), 4, 4)
