"""How many KV blocks a sequence has, and which programs compute them, decided on the host by shapes alone.

states_triton.py defines KV blocks.  The choices made here do not change a result's bits, except for the sizes of KV blocks
(`min_keys` and DOUBLINGS).  This module knows no kernel.

Shapes: T queries, H heads, D width of a value, S states of a query.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.attention.segment import Segment

BLOCK_M = 64  # rows of a tile (queries x heads of a group): with another number tensor cores would add up in another order
DOUBLINGS = 4  # how often the size of KV blocks doubles
BLOCKS_PER_SIZE = 16  # KV blocks of one size
FULL_GPU = 0.8  # threshold: the share of the GPU that has work if each program computes all KV blocks of its queries
MAX_SCRATCH = 1 << 28  # threshold in bytes: with more memory for states, each program computes all KV blocks of its queries
MAX_WIDTH = 256  # of ordinary heads: wider tiles of BLOCK_M rows have neither registers nor shared memory
MAX_COLUMNS = 256  # columns of a latent that one program adds up: longer latents are cut into two equal parts


class KVBlocks(NamedTuple):
    """min_keys: of the first KV blocks.  merged: states that the merging kernel loads together.  columns: as MAX_COLUMNS."""

    min_keys: int = 128
    merged: int = 8
    columns: int = MAX_COLUMNS


KV_BLOCKS = KVBlocks()


class WorkSplit(NamedTuple):
    """How queries and keys are split over programs.

    tiles: of the queries of a row.  programs: for all rows and tiles.
    blocks: how many programs share a tile's keys; each computes one KV block.
    states: S, the partial states of a query that are left in memory for another kernel to merge.
    """

    tiles: int
    programs: int
    blocks: int
    states: int

    @property
    def unsplit(self) -> bool:
        """Whether one program computes all KV blocks of its queries."""
        return self.blocks == 1


@dataclass(frozen=True)
class KVBlockPlan:
    """A plan, and the scratch memory that its layers share.

    paged: prefixes, or causal rows.  suffix: the nodes' paths if there are trees.  blocks: the sizes of KV blocks.
    """

    paged: Segment
    suffix: Segment | None
    blocks: KVBlocks = KV_BLOCKS
    _scratch: dict[tuple[int, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def split_work(self, T: int, H: int, D: int, rows: int, group: int, programs: int) -> WorkSplit:
        """rows: of keys, over all sequences and kv heads.  group: heads that read the same keys.  programs: of the GPU."""
        tiles, blocks = -(-self.paged.max_seqlen_q * group // BLOCK_M), max_kv_blocks(self.paged, self.blocks.min_keys)
        unsplit = blocks == 1 or rows * tiles >= FULL_GPU * programs or 4 * T * H * blocks * D > MAX_SCRATCH
        return WorkSplit(tiles, rows * tiles, 1 if unsplit else blocks, 2 if unsplit else blocks)

    def scratch(self, T: int, H: int, S: int, D: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Memory for states: weighted values [T, H, S, D], and maximum and sum of weights [T, H, S, 2], float32."""
        if (T, H, S, D) not in self._scratch:
            shapes = (T, H, S, D), (T, H, S, 2)
            values, sums = (torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes)
            self._scratch[T, H, S, D] = values, sums
        return self._scratch[T, H, S, D]


def column_parts(rank: int, columns: int = MAX_COLUMNS) -> int:
    """Into how many parts the kernels cut the columns of latents of that rank; 0: they can't read such latents."""
    return 1 if rank <= columns else 2 if rank <= 2 * columns and rank % 2 == 0 else 0


def doublings_of(span: int | None, min_keys: int) -> int:
    """How often the size of KV blocks doubles.  A layer that reads a span of keys gets blocks of at most a 16th of it."""
    return DOUBLINGS if span is None else min(DOUBLINGS, max(0, (span // (BLOCKS_PER_SIZE * min_keys)).bit_length() - 1))


def max_kv_blocks(segment: Segment, min_keys: int) -> int:
    """The most KV blocks that the keys of one tile's queries can lie in, by what the host knows."""
    doublings, capacity = doublings_of(segment.span, min_keys), segment.pages.capacity
    whole = kv_blocks_before(capacity, doublings, min_keys)
    if segment.span is None:
        return whole
    near = segment.span + segment.max_seqlen_q + min_keys  # keys that may reach into one KV block more
    return min(whole, kv_blocks_before(near, doublings, min_keys) + 1)


def kv_blocks_before(position: int, doublings: int, min_keys: int) -> int:
    """How many KV blocks begin before a position; at min_keys 1.  `states_triton.kv_block_of` is the same for the kernels."""
    blocks, first = 0, 0
    while first < position:
        first += min_keys << min(blocks // BLOCKS_PER_SIZE, doublings)
        blocks += 1
    return max(1, blocks)
