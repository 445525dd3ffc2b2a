"""The tiles of products with weights of 8 or 4 bits, chosen by shapes alone.

Measured on an H200: benchmarks/quantised_tiles.py.  This module knows no tensor and no model.

Shapes: T rows, I in, O out.
"""

from __future__ import annotations

from functools import cache

from specdec.ops.products.tiles import ProductTiles
from specdec.ops.quantised.codes import Kind

FEW = 64  # threshold in rows of x: more are left to cuBLAS


@cache
def quantised_tiles(T: int, O: int, I: int, kind: Kind, group: int, gated: bool) -> ProductTiles | None:
    """The kernel's tiles for T rows and a weight of O rows and I columns; None: the weight is converted, and cuBLAS is used."""
    if not 0 < T <= FEW:
        return None
    block_t = max(8, 1 << (T - 1).bit_length())
    step = max(32, min(128, group or 128))
    return ProductTiles(block_t, 64, step, -(-I // 8192), 4, 4)
