"""The tiles of products with experts' weights in 8 or 4 bits, chosen by shapes alone.  Knows no tensor and no model.

Shapes: P pairs of a token and an expert, E experts.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from specdec.ops.quantised.codes import Kind, codes_a_word

MOST_READ = 512  # threshold in pairs: programs find their pairs in more by sorting them first


class ExpertTiles(NamedTuple):
    """What one program works on.

    block_t: pairs (padded).  block_o: rows of a matrix.  warps, stages: Triton's.
    """

    block_t: int
    block_o: int
    warps: int
    stages: int


@cache
def expert_tiles(pairs: int, experts: int, kind: Kind, gated: bool) -> ExpertTiles:
    """By how many pairs an expert has on average."""
    each = -(-pairs // experts)
    block_t = min(64, max(8, 1 << (each - 1).bit_length()))
    if block_t >= 32:
        return ExpertTiles(block_t, 64, 4, 3)
    return ExpertTiles(block_t, 32, 2, 6 if codes_a_word(kind) == 4 else 4)
