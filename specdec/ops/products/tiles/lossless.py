"""The tiles of products with lossless 12-bit weights, chosen by shapes and the kind of GPU alone.

They were measured on an H100 and an H200: benchmarks/products/README.md, "Lossless weights".  This module knows no tensor and
no model.

Shapes: M rows, K in, N out.
"""

from __future__ import annotations

from functools import cache

from specdec.ops.products.formats.lossless import ALIGN_K, ALIGN_N
from specdec.ops.products.gpus import GpuKind
from specdec.ops.products.tiles.quantised import FEW, QuantisedTiles, TileSizes, fitted, shape_of, tile_rows

# By rows of x and a weight's shape: block_n, block_k (0: slices'), splits, warps, stages, slices, registers.
FEW_ROWS: dict[int, dict[str, TileSizes]] = {
    1: {"square": (16, 0, 1, 4, 5, 4, 64), "mid N": (16, 0, 1, 4, 5, 4, 64), "large N": (64, 0, 1, 4, 6, 1, 96),
        "large K": (32, 0, 2, 4, 5, 2, 80)},
    8: {"square": (64, 0, 4, 4, 3, 1, 96), "mid N": (32, 0, 1, 4, 4, 2, 96), "large N": (64, 0, 1, 4, 4, 1, 96),
        "large K": (64, 0, 4, 4, 5, 1, 96)},
    16: {"square": (64, 256, 2, 4, 4, 1, 96), "mid N": (64, 256, 1, 4, 5, 1, 96), "large N": (64, 256, 1, 4, 3, 1, 96),
         "large K": (64, 256, 2, 4, 6, 1, 96)},
}  # fmt: skip
# The same by the kind of GPU.  Where an H200 has no entry for a shape, dense weights were as fast on it.
MORE_ROWS: dict[str, dict[int, dict[str, TileSizes]]] = {
    "H100": {
        32: {"square": (64, 256, 2, 4, 4, 1, 96), "mid N": (64, 256, 1, 4, 4, 1, 96), "large N": (64, 256, 1, 4, 2, 1, 96),
             "large K": (64, 256, 2, 8, 4, 2, 128)},
        64: {"square": (64, 256, 2, 4, 3, 1, 112), "mid N": (64, 128, 1, 8, 6, 2, 144), "large N": (64, 256, 1, 4, 2, 1, 128),
             "large K": (64, 256, 2, 4, 4, 1, 128)},
    },
    "H200": {
        32: {"square": (64, 256, 2, 8, 4, 2, 128), "mid N": (64, 256, 1, 4, 4, 1, 96), "large N": (128, 128, 1, 8, 3, 1, 80),
             "large K": (64, 256, 2, 4, 5, 1, 96)},
        64: {"large N": (64, 128, 1, 4, 4, 1, 128)},
    },
}  # fmt: skip


@cache
def lossless_tiles(M: int, N: int, K: int, gated: bool, kind: GpuKind) -> QuantisedTiles | None:
    """Tiles of kernels/quantised/hopper_launch.py's kernels for M rows and a weight of N rows (gate's and up's) and K columns;
    None: the product takes the dense weight.

    kind: of GPU, whose tiles are taken.
    """
    if not 0 < M <= FEW or N % (2 * ALIGN_N if gated else ALIGN_N) or K % ALIGN_K:
        return None
    rows = tile_rows(M)
    choice = (FEW_ROWS | MORE_ROWS[kind.name])[rows].get(shape_of(N, K))
    return None if choice is None else fitted(M, N, K, choice, 2, 12)
