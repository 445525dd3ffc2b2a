"""Tile sizes of the paged kernel, and how far a row's keys are split over the GPU: measured choices, by shapes alone.

Knows no tensor.  Shapes: D head dim.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton


class PagedTiles(NamedTuple):
    """What one program of the paged kernel works on: packed queries x heads, keys a step; and its warps and stages.

    least: keys of a split, or merging costs more than splitting gains.  registers: the most a thread may use, so that two
    programs fit an SM; None leaves it to the compiler.  an_sm: programs of it to plan for on each SM.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    least: int = 128
    registers: int | None = None
    an_sm: int = 1


def padded(D: int) -> int:
    """Tiles have power-of-two sides, and a tensor-core product needs 16."""
    return max(16, triton.next_power_of_2(D))


@lru_cache
def paged_tiles(packed_queries: int, D: int, itemsize: int, quant: str, causal: bool, waves: float) -> PagedTiles:
    """Measured on an H100 with heads of 128; other dims keep a stage's bytes.  waves: of the GPU, at one tile a row and head.

    Up to 64 packed queries the keys decide: large blocks where a row is split over SMs that hold one program each, small
    ones where rows are many and SMs hold two.  A lone token has so little to merge that it is split further.  Beyond 64,
    the arithmetic decides.  Long prompts have enough tiles for two programs an SM, one of which computes while the other
    waits.  float32 has no tensor cores to fill, and spills beyond its tiles.  8-bit keys (quant: whose scales, or "") are made
    16-bit on the way into a product of 64 rows or more: smaller ones would read them from shared memory byte by byte.
    """

    def keys(most: int) -> int:
        return max(16, min(most, most * 256 // (padded(D) * itemsize)))

    wanted = max(16, triton.next_power_of_2(packed_queries))
    if itemsize == 4:
        return PagedTiles(min(wanted, 32), keys(64), 8, 2)
    if quant and (wanted <= 64 or D > 128):
        if quant == "head":
            return PagedTiles(64, keys(128), 4, 3, an_sm=2)
        return PagedTiles(64, keys(128), 4, 2, an_sm=2) if waves > 0.3 else PagedTiles(64, keys(64), 4, 3, an_sm=2)
    if quant:
        return PagedTiles(128, 64, 8, 3, registers=128, an_sm=2) if waves > 0.3 else PagedTiles(128, 64, 8, 3)
    if wanted == 16:
        return PagedTiles(16, keys(128), 4, 3) if waves > 0.1 else PagedTiles(16, keys(64), 4, 3, least=64)
    if wanted == 32:
        return PagedTiles(32, keys(128), 4, 3) if waves < 0.8 else PagedTiles(32, keys(64), 4, 3)
    if wanted == 64 or D > 128:
        return PagedTiles(64, keys(64), 4, 4 if waves < 0.8 else 3)
    if causal and wanted > 128:
        return PagedTiles(128, 64, 8, 2, registers=128) if waves * wanted > 1024 else PagedTiles(64, 64, 4, 3)
    return PagedTiles(128, 64, 8, 3)


@lru_cache
def splits_for(programs_per_split: int, max_keys: int, least: int, programs: int) -> int:
    """As many splits as fill the GPU, none of fewer than `least` keys.  Of those that fill its waves about equally, the fewest.

    max_keys is the table's capacity, not the rows' length, which only the device knows: a split finds its own range there,
    so a short row in a large table merely leaves splits idle.
    """
    most = max(1, min(triton.cdiv(max_keys, least), 128))
    if programs_per_split * most <= programs:
        return most
    if programs_per_split >= 0.8 * programs:
        return 1

    def fill(splits: int) -> float:
        waves = programs_per_split * splits / programs
        return waves / -(-waves // 1)

    candidates = range(1, min(most, triton.cdiv(2 * programs, programs_per_split)) + 1)
    best = max(map(fill, candidates))
    return next(splits for splits in candidates if fill(splits) >= 0.95 * best)


def chunk_for(splits: int, group_elements: int) -> int:
    """Split states the merge reads at once: as many as fit in one warp's registers, or the one there is."""
    return 1 if splits <= 1 else max(1, min(8, 4096 // group_elements))


@lru_cache
def programs_at_once(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16
