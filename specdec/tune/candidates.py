"""Tiles that are tried for a product: those that the tables name, and their neighbours.

Shapes: M rows.
"""

from __future__ import annotations

from specdec.ops.products.gpus import H100, GpuMatch
from specdec.ops.products.tiles.dense import HALF_SM, SMS, WHOLE_SM, ProductTiles, padded_rows, product_tiles
from specdec.ops.products.tuned.table import Product

MAX_ROWS = 64  # beyond it products are limited by arithmetic, and the tables' own kernels are taken
STREAMS = (  # rows of the weight, columns of a step, splits, warps, stages
    (32, 128, 1, 4, 4), (32, 256, 1, 4, 6), (64, 128, 2, 2, 6), (64, 128, 4, 4, 6), (64, 256, 1, 2, 4), (64, 256, 1, 4, 4),
    (64, 256, 2, 4, 4), (128, 128, 1, 8, 4), (128, 256, 1, 4, 3), (16, 256, 1, 2, 4),
)  # fmt: skip


def candidates(M: int, product: Product, match: GpuMatch) -> list[ProductTiles | None]:
    """Different tiles for M rows, of which the first are those of the GPU's kind.  None: cuBLAS."""
    assert 0 < M <= MAX_ROWS
    N, K, gated, dtype = product
    built_in = [product_tiles(M, N, K, dtype, gated, kind) for kind in ((match.kind, H100) if match.hopper else (H100,))]
    block_m = max(8, 1 << (M - 1).bit_length())
    streams = [ProductTiles("stream_triton", block_m, *stream) for stream in STREAMS]
    hopper = _hopper(padded_rows(M), product) if match.hopper and N % (16 if gated else 8) == 0 and K % 8 == 0 else []

    def fits(tiles: ProductTiles) -> bool:
        return tiles.shared_bytes(dtype.itemsize) <= WHOLE_SM and tiles.splits <= -(-K // tiles.block_k)

    return list(dict.fromkeys([*built_in, *filter(fits, (*streams, *hopper)), None]))


def _hopper(block_m: int, product: Product) -> list[ProductTiles]:
    """Tiles of the kernel for Hopper: one program an SM or two, and as many splits as fill the SMs, or twice as many."""
    found, tiles = [], -(-product.N // 64)
    for block_k in (128, 256):
        stage = (64 + block_m) * block_k * product.dtype.itemsize
        for room in (HALF_SM, WHOLE_SM):
            for splits in {1, max(1, SMS // tiles), max(1, 2 * SMS // tiles)}:
                stages = min(12, room // stage)
                if stages > 1:
                    found.append(ProductTiles("stream_hopper", block_m, 64, block_k, splits, 4, stages))
    return found
