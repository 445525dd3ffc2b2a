"""The tiles of products with weights of 8 or 4 bits, chosen by shapes alone.

Most were measured on an H200, for some numbers of rows: benchmarks/products/README.md, "Weights in 8 and 4 bits".  This
module knows no tensor and no model.

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
# The kinds, columns of a scale and zeros whose products by the Hopper kernels were held against float64 on a GPU.
SEEN: tuple[tuple[Kind, int, bool], ...] = (("e4m3", 0, False), ("int4", 128, False))
SHARED = 227_000  # bytes of shared memory that all programs of an SM may have
CHUNK = 32  # groups whose scales a program of a Hopper kernel loads at once
LOADERS, LOADER = 4, 24  # warps that the loading warp counts for, and registers that a thread of it keeps


class HopperTiles(NamedTuple):
    """What one program of linear_hopper.py's kernels works on.

    block_t: rows of x (padded).
    block_o: rows of the weight.
    block_i: columns of a step.
    splits: programs that share a tile's columns.
    warps: that multiply.
    stages: steps whose codes are in shared memory at one time.
    slices: groups of warps that take different columns; others take different rows.
    alone: whether each warp multiplies alone, and slices are of a step; else four do together, and slices take steps in turn.
    registers: of a thread, before the loading warp's are given to the others.
    """

    block_t: int
    block_o: int
    block_i: int
    splits: int
    warps: int
    stages: int
    slices: int
    alone: bool
    registers: int

    @property
    def of_program(self) -> int:
        """Tiles of the weight that a program's groups of four warps take."""
        return 1 if self.alone else self.warps // 4 // self.slices

    @property
    def others(self) -> int:
        """Registers of a thread of a second group of four warps: as many as the first has."""
        warps = self.warps + LOADERS
        return (self.registers * warps - LOADER * LOADERS) // self.warps // 8 * 8


@cache
def hopper_tiles(T: int, O: int, I: int, kind: Kind, group: int, zeros: bool, gated: bool) -> HopperTiles | None:
    """Tiles of linear_hopper.py's kernels for T rows and a weight of O rows (gate's and up's) and I columns; None: another one.

    group: columns of a scale, 0: all.  zeros: whether there are zeros.  Those of 1 and of 17 to 32 rows were measured on an
    H200, those of 2 to 16 and of 64 with an earlier form of the kernels: benchmarks/products/README.md, "Weights in 8 and 4
    bits".
    """
    if not 0 < T <= FEW or (kind, group, zeros) not in SEEN or O % (16 if gated else 8) or I % (64 * codes_a_word(kind)):
        return None
    block_t = 1 if T == 1 else max(8, 1 << (T - 1).bit_length())
    if T == 1:
        block_o, slices, warps, splits, spare = _of_one_row(O, I, kind)
    elif T <= 16:
        block_o, slices, warps, spare = (128, 1, 8, 0) if O >= WIDE else (64, 1, 4, 0 if I > LONG else 2)
        splits = 1 if O >= WIDE else max(1, 3 * SMS // _parts(O, block_o))
    else:
        block_o, slices, warps, splits, spare = _of_more_rows_together(T, O, I, kind)
    block_i = 64 * slices * codes_a_word(kind) or (256 if T <= 32 else 128)
    tiles = _parts(O, block_o)
    splits = min(splits, _parts(I, 2 * block_i)) if tiles <= MOST_TILES else 1
    programs = _parts(tiles * splits, SMS) + spare  # that an SM has room for, some of them the next product's
    stage = 2 * block_i * (block_o // codes_a_word(kind) + (block_t if T > 1 else 0))
    kept = 4 * block_o * kept_groups(I, group, block_i, splits) + (2 * _parts(I, splits) if T == 1 else 0)
    stages = max(2, min(12, (SHARED // min(programs, 5) - kept - 3000) // stage))
    return HopperTiles(block_t, block_o, block_i, splits, warps, stages, slices)


def _of_one_row(O: int, I: int, kind: Kind) -> tuple[int, int, int, int, int]:
    """block_o, slices, warps, splits, and room for how many programs more."""
    if O >= WIDE:
        return 128, 1, 4, 1, 0
    if codes_a_word(kind) == 2:
        block_o, warps = (16, 4) if I > LONG else (32, 8)
        return block_o, 4, warps, 1, int(_parts(O, block_o) <= SMS)
    if O <= 4096 and I <= LONG:
        return 32, 4, 4, 1, 1
    return 64, 1, 4, max(1, 4 if I <= LONG else 2 * SMS // _parts(O, 64)), 2


def _of_more_rows_together(T: int, O: int, I: int, kind: Kind) -> tuple[int, int, int, int, int]:
    """The same for more than 16 rows."""
    if O >= WIDE:
        return 128, 0, 4 if T <= 32 else 8, 1, 0
    tiles = _parts(O, 64)
    if codes_a_word(kind) == 2:
        splits = max(2 if tiles <= SMS else 1, SMS // tiles)
        return 64, 0, 4, splits, int(tiles * splits <= SMS and I <= LONG)
    splits = max(1, (2 if I > LONG else 1) * SMS // tiles)
    return 64, 0, 4, splits, int(tiles * splits <= SMS)


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
