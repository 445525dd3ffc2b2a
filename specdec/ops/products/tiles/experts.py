"""The tiles of products with experts' weights in 8 or 4 bits, chosen by shapes alone.  Knows no tensor and no model.

They were measured on an H200: benchmarks/products/README.md, "Experts in 8 and 4 bits".

Shapes: P pairs of a token and an expert, E experts.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

FEW = 64  # threshold in pairs: fewer have too few tiles for all SMs
MOST_READ = 512  # threshold in pairs: programs find their pairs in more by sorting them first


class ExpertTiles(NamedTuple):
    """What one program works on.

    block_t: pairs (padded).  block_o: rows of a matrix.  warps, stages: Triton's.  unroll: steps of 128 columns between two
        looks at the pipeline.
    """

    block_t: int
    block_o: int
    warps: int
    stages: int
    unroll: int = 1


@cache
def expert_tiles(pairs: int, experts: int) -> ExpertTiles:
    """By how many pairs there are, and how many an expert has on average."""
    each = -(-pairs // experts)
    block_t = min(64, max(8, 1 << (each // 2).bit_length()))
    if block_t > 16:
        return ExpertTiles(block_t, 64, 4, 3)
    if block_t > 8:
        return ExpertTiles(block_t, 128, 4, 3)
    return ExpertTiles(8, 128, 4, 3, unroll=2) if pairs > FEW else ExpertTiles(8, 32, 2, 3, unroll=2)
