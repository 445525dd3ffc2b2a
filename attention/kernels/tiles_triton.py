"""Tile sizes of the paged kernel, and the number of splits of a row's keys, chosen by shapes alone.

The choices were measured: benchmarks/layers/README.md, "Why the tiles and rules are what they are".  This module knows no
tensors.  Shapes: D head dim.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton

SHORT = 4096  # threshold in keys: with more, tiles of fewer queries cost more than they gain, because keys are read again
FEW_SPLITS = 4  # threshold: up to so many, two at a time are merged faster than eight
MERGING = 528  # programs of a merge: four warps for each SM of an H200
MIN_COLUMNS, IN_REGISTERS = 32, 2048  # of a merge that shares out columns: the fewest, and numbers that a warp reads at once


class PagedTiles(NamedTuple):
    """What one program of the paged kernel works on.

    block_m: rows, each a query and a head of its group (packed GQA).
    block_n: keys of a step.
    warps, stages: Triton's.
    min_split_keys: the fewest keys of a split; with fewer, merging costs more than splitting gains.
    registers: the most registers of a thread, so that two programs fit an SM; None: the compiler decides.
    ctas_per_sm: programs (CTAs) for which `splits_for` plans on each SM.
    hopper: whether paged_hopper.py's kernel is meant (hopper_tiles.py).
    joined: whether that kernel multiplies a block's pages together.
    parts: programs that share the columns of a tile's values (wide_many_hopper.py).
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    min_split_keys: int = 128
    registers: int | None = None
    ctas_per_sm: int = 1
    hopper: bool = False
    joined: bool = False
    parts: int = 1

    def within(self, room: int, key_bytes: int, query_bytes: int) -> PagedTiles:
        """These tiles with as many stages as the GPU has shared memory for: those for 128 dims were measured with 227 KB.

        room: bytes that a program may have.  key_bytes: of a key and its value, and query_bytes of a query, as tiles hold them.
        """
        block = self.block_n * key_bytes  # of each stage but one
        others = self.block_m * (query_bytes + self.block_n * 2)  # queries, and weights of 16 bits
        max_stages = 1 + (room - others) // block
        if max_stages < 2 and self.block_m > 64:  # where a GPU has too little for so many wide queries
            return self._replace(block_m=64, warps=4).within(room, key_bytes, query_bytes)
        return self if self.stages <= max_stages else self._replace(stages=max(1, max_stages))


def padded(D: int, int8_product: bool = False) -> int:
    """The side of a tile that holds D elements: tiles have power-of-two sides, and a tensor-core product needs at least 16
    elements, or 32 of 8 bits.
    """
    return max(32 if int8_product else 16, triton.next_power_of_2(D))


@lru_cache
def paged_tiles(
    seqlen_q_packgqa: int, D: int, itemsize: int, quant: str, causal: bool, waves: float, max_keys: int,
    int8_queries: bool = False,
) -> PagedTiles:  # fmt: skip
    """The tiles for a row's queries x heads of a kv head, as many as seqlen_q_packgqa (flash-attn's name) says.

    D: head dim.  The tiles were measured for 128; other dims keep the bytes of a pipeline stage.
    itemsize: bytes of a query's element.
    quant: the kv_cache_dtype of an 8-bit cache, "fp8", "int8" or "int8_keys"; "" for a 16- or 32-bit cache.
    causal: whether the segment is causal.
    waves: rows x kv heads, as a share of the programs that the GPU runs at once.
    max_keys: the segment's: about the most keys of a row.
    int8_queries: whether int8 keys are multiplied as they are.

    Up to 64 queries x heads, reading keys takes the time: blocks are large where a row is split over SMs that hold one program
    each, and small where an SM holds two programs or three: with many rows, and for one query or a few of one row with many
    keys.  A single query has little to merge, so it is split further.  Beyond 64, arithmetic takes the time; with few rows and
    few keys, tiles of 64 then give more SMs work.
    Long prompts have enough tiles for two programs an SM, one of which computes while the other waits.  Of heads wider than 128
    an SM holds one program: of twice the rows, whose halves take turns, and nothing of it spills (24 heads of 256, a prompt of
    8,192: 610 us a layer, 830 with two of 64 rows).  float32 does not use
    tensor cores, and larger tiles would spill registers.  8-bit keys are converted to 16 bits on the way into a product of 64
    rows or more; a smaller product would read them byte by byte.  Where only keys have 8 bits, products of 16 rows are faster
    all the same, and of 32 where there are many rows or no conversion.
    """

    def keys(wanted_keys: int) -> int:
        return max(16, min(wanted_keys, wanted_keys * 256 // (padded(D) * itemsize)))

    wanted = max(16, triton.next_power_of_2(seqlen_q_packgqa))
    if itemsize == 4:
        return PagedTiles(min(wanted, 32), keys(64), 8, 2)
    if quant == "int8_keys" and wanted <= 32 and (wanted == 16 or waves > 0.8 or int8_queries):
        return PagedTiles(wanted, keys(128), 4, 3, ctas_per_sm=2 if int8_queries else 1)
    if (quant == "int8_keys" or int8_queries) and (wanted <= 64 or D > 128):
        return PagedTiles(64, keys(64), 4, 3, ctas_per_sm=2)
    if int8_queries:
        return PagedTiles(128, 64, 8, 3)
    if quant and (wanted <= 64 or D > 128):
        if quant == "fp8":
            return PagedTiles(64, keys(128), 4, 3, ctas_per_sm=2)
        return PagedTiles(64, keys(128), 4, 2, ctas_per_sm=2) if waves > 0.3 else PagedTiles(64, keys(64), 4, 3, ctas_per_sm=2)
    if quant:
        return PagedTiles(128, 64, 8, 3, registers=128, ctas_per_sm=2) if waves > 0.3 else PagedTiles(128, 64, 8, 3)
    if wanted == 16:
        if waves >= 0.8:
            return PagedTiles(16, keys(64), 4, 4)
        if waves > 0.1:
            return PagedTiles(16, keys(128), 4, 3)
        few = PagedTiles(16, keys(64), 4, 3, min_split_keys=64)
        return few._replace(stages=2, ctas_per_sm=3) if max_keys > SHORT else few
    if wanted == 32:
        if waves < 0.1 and max_keys > SHORT and D <= 128:
            return PagedTiles(32, keys(64), 4, 3, ctas_per_sm=2)
        return PagedTiles(32, keys(128), 4, 3) if waves < 0.8 else PagedTiles(32, keys(64), 4, 3)
    return _of_many_rows(wanted, D, keys(64), causal, waves, max_keys)


def _of_many_rows(wanted: int, D: int, block_n: int, causal: bool, waves: float, max_keys: int) -> PagedTiles:
    """`paged_tiles` of 16-bit keys for more than 32 queries x heads.  block_n: keys of a step with 64 rows of D dims."""
    if 128 < D <= 256 and causal and wanted > 128 and waves * wanted > 256:
        return PagedTiles(128, block_n, 8, 3)
    if wanted == 64 or D > 128:
        return PagedTiles(64, block_n, 4, 4 if waves < 0.8 else 3)
    if causal and wanted > 128:
        return PagedTiles(128, 64, 8, 2, registers=128) if waves * wanted > 1024 else PagedTiles(64, 64, 4, 3)
    if wanted == 128 and waves < 0.1 and not causal and max_keys <= SHORT:
        return PagedTiles(64, min(128, 2 * block_n), 4, 2)
    return PagedTiles(128, 64, 8, 3)


@lru_cache
def single_query_tiles(group: int, D: int, itemsize: int, waves: float, max_keys: int) -> PagedTiles | None:
    """Tiles of single_query_triton.py.  group: query heads of a kv head; the other names are those of `paged_tiles`.

    None: the kernel was measured to lose there (D of 64: the small product in front lets it start too late), or not at all.
    """
    if D != 128 or group > 16 or waves > 0.1 or max_keys > SHORT:
        return None
    return PagedTiles(16, 64 if itemsize == 2 else 32, 4, 2, min_split_keys=64)


@lru_cache
def splits_for(programs_per_split: int, max_keys: int, min_split_keys: int, programs: int) -> int:
    """The number of splits that fills the GPU, with at least `min_split_keys` keys a split; of those that fill it
    about equally, the fewest.

    programs_per_split: programs that one split takes over all rows and heads.
    max_keys: the table's capacity in keys.  Only the device knows the rows' lengths: each split computes its own range of keys
        there, so a short row in a large table just leaves splits idle.
    programs: how many programs the GPU runs at once.
    """
    max_splits = max(1, min(triton.cdiv(max_keys, min_split_keys), 128))
    if programs_per_split * max_splits <= programs:
        return max_splits
    if programs_per_split >= 0.8 * programs:
        return 1

    def fill(splits: int) -> float:
        waves = programs_per_split * splits / programs
        return waves / -(-waves // 1)

    candidates = range(1, min(max_splits, triton.cdiv(2 * programs, programs_per_split)) + 1)
    best = max(map(fill, candidates))
    return next(splits for splits in candidates if fill(splits) >= 0.95 * best)


class MergeTiles(NamedTuple):
    """What one program of the merge kernel works on: columns of the values, and how many splits' states it reads at once."""

    columns: int
    chunk: int


@lru_cache
def merge_tiles(programs: int, splits: int, group: int, E: int) -> MergeTiles:
    """Tiles for a merge by one warp.

    programs: queries x groups of heads.  group: padded heads of a group.  E: value dim.
    Each chunk is a round trip to L2.  So where the GPU has room, queries share out their columns until a program reads all
    splits at once, or as many as a warp's registers hold.  Few splits mean many queries, and with fewer registers more programs
    run at once: two states then, unless more take no more room than two of four heads of 128.
    """
    columns, whole = padded(E), padded(E)
    if splits <= FEW_SPLITS or programs > MERGING:
        max_chunk = max(2, 1024 // (group * whole)) if splits <= FEW_SPLITS else 8
        return MergeTiles(whole, max(1, min(8, max_chunk, 4096 // (group * whole), triton.next_power_of_2(max(1, splits)))))
    while splits * group * columns > IN_REGISTERS and columns > MIN_COLUMNS and 2 * programs * whole // columns <= MERGING:
        columns //= 2
    return MergeTiles(columns, max(1, min(triton.next_power_of_2(splits), IN_REGISTERS // (group * columns))))


@lru_cache
def programs_at_once(device: torch.device) -> int:
    """The device's number of SMs; 16 for a CPU, where the kernels run in Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 16
