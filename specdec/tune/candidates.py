"""Tiles that are tried for a product: those that the tables name, and their neighbours.

Shapes: T rows.
"""

from __future__ import annotations

from specdec.ops.products.gpus import H100, Match
from specdec.ops.products.tiles.dense import HALF_SM, SMS, WHOLE_SM, ProductTiles, padded_rows, product_tiles
from specdec.ops.products.tuned.table import Product

MOST_ROWS = 64  # beyond it products are limited by arithmetic, and the tables' own kernels are taken
STREAMS = (  # rows of the weight, columns of a step, splits, warps, stages
    (32, 128, 1, 4, 4), (32, 256, 1, 4, 6), (64, 128, 2, 2, 6), (64, 128, 4, 4, 6), (64, 256, 1, 2, 4), (64, 256, 1, 4, 4),
    (64, 256, 2, 4, 4), (128, 128, 1, 8, 4), (128, 256, 1, 4, 3), (16, 256, 1, 2, 4),
)  # fmt: skip


def candidates(T: int, product: Product, match: Match) -> list[ProductTiles | None]:
    """Different tiles for T rows, of which the first are those of the GPU's kind.  None: cuBLAS."""
    assert 0 < T <= MOST_ROWS
    O, I, gated, dtype = product
    built_in = [product_tiles(T, O, I, dtype, gated, kind) for kind in ((match.kind, H100) if match.hopper else (H100,))]
    block_t = max(8, 1 << (T - 1).bit_length())
    streams = [ProductTiles(block_t, *stream) for stream in STREAMS]
    hopper = _hopper(padded_rows(T), product) if match.hopper and O % (16 if gated else 8) == 0 and I % 8 == 0 else []

    def fits(tiles: ProductTiles) -> bool:
        return tiles.shared_bytes(dtype.itemsize) <= WHOLE_SM and tiles.splits <= -(-I // tiles.block_i)

    return list(dict.fromkeys([*built_in, *filter(fits, (*streams, *hopper)), None]))


def _hopper(block_t: int, product: Product) -> list[ProductTiles]:
    """Tiles of the kernel for Hopper: one program an SM or two, and as many splits as fill the SMs, or twice as many."""
    found, tiles = [], -(-product.O // 64)
    for block_i in (128, 256):
        stage = (64 + block_t) * block_i * product.dtype.itemsize
        for room in (HALF_SM, WHOLE_SM):
            for splits in {1, max(1, SMS // tiles), max(1, 2 * SMS // tiles)}:
                stages = min(12, room // stage)
                if stages > 1:
                    found.append(ProductTiles(block_t, 64, block_i, splits, 4, stages, lag=0 if block_t <= 16 else 1))
    return found
