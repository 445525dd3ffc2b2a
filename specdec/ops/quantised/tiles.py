"""The tiles of products with weights of 8 or 4 bits, chosen by shapes alone.

Those of up to 16 rows were measured on an H200, for one row: benchmarks/README.md, "Weights in 8 and 4 bits".  Of those for
more rows, wide 8-bit weights' alone were.  This module knows no tensor and no model.

Shapes: T rows, I in, O out.
"""

from __future__ import annotations

from functools import cache

from specdec.ops.products.tiles import SMS, ProductTiles
from specdec.ops.quantised.codes import Kind, codes_a_word

MOST_TILES = 1024  # of a split product: as many as there are counters of arrivals
FEW = 64  # threshold in rows of x: more are left to cuBLAS
WIDE, LONG = 16384, 8192  # thresholds in rows and in columns of the weight


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
