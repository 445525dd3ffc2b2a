"""How the leaves of a sequence are counted on the host, and who computes which of them, by shapes alone.

states_triton.py says what leaves are.  Any choice made here gives the same bits, but for those of `least` and OCTAVES.  This
module knows no kernel.

Shapes: T queries, H heads, D width of a value, S states of a query.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.attention.segment import Segment

BLOCK_M = 64  # packed queries x heads of a tile: with another number tensor cores would add up in another order
OCTAVES = 4  # how often the length of leaves doubles
IN_OCTAVE = 16  # leaves of one length
FULL_GPU = 0.8  # threshold: the share of the GPU that has work if each program computes all leaves of its queries
MAX_SCRATCH = 1 << 28  # threshold in bytes: with more memory for states, each program computes all leaves of its queries
PIECE = 256  # the most columns of a latent that one program adds up: longer ones are cut into two equal pieces


class Leaves(NamedTuple):
    """least: keys of the first leaves.  joined: states that the joining kernel loads together.  piece: as PIECE."""

    least: int = 128
    joined: int = 8
    piece: int = PIECE


LEAVES = Leaves()


class Shares(NamedTuple):
    """Who computes what.

    tiles: of the queries of a row.  programs: for all rows and tiles.
    leaves: how many programs share a tile's keys; each computes one leaf.
    states: S, that a query leaves in memory for another kernel to join.
    """

    tiles: int
    programs: int
    leaves: int
    states: int

    @property
    def one(self) -> bool:
        """Whether a program computes all leaves of its queries."""
        return self.leaves == 1


@dataclass(frozen=True)
class LeavesPlan:
    """A plan, and the scratch memory that its layers share.

    paged: prefixes, or causal rows.  suffix: the nodes' paths if there are trees.  leaves: how keys are divided.
    """

    paged: Segment
    suffix: Segment | None
    leaves: Leaves = LEAVES
    _scratch: dict[tuple[int, ...], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def shares(self, T: int, H: int, D: int, rows: int, group: int, programs: int) -> Shares:
        """rows: of keys, over all sequences and kv heads.  group: heads that read the same keys.  programs: of the GPU."""
        tiles, most = -(-self.paged.max_seqlen_q * group // BLOCK_M), most_leaves(self.paged, self.leaves.least)
        one = most == 1 or rows * tiles >= FULL_GPU * programs or 4 * T * H * most * D > MAX_SCRATCH
        return Shares(tiles, rows * tiles, 1 if one else most, 2 if one else most)

    def scratch(self, T: int, H: int, S: int, D: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Memory for states: weighted values [T, H, S, D], and maximum and sum of weights [T, H, S, 2], float32."""
        if (T, H, S, D) not in self._scratch:
            shapes = (T, H, S, D), (T, H, S, 2)
            values, sums = (torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes)
            self._scratch[T, H, S, D] = values, sums
        return self._scratch[T, H, S, D]


def pieces(rank: int, most: int = PIECE) -> int:
    """Into how many pieces the kernels cut latents of that rank; 0: they can't read such latents."""
    return 1 if rank <= most else 2 if rank <= 2 * most and rank % 2 == 0 else 0


def octaves_of(span: int | None, least: int) -> int:
    """How often the length of leaves doubles.  A layer that reads a span of keys gets leaves of a 16th of the span at most."""
    return OCTAVES if span is None else min(OCTAVES, max(0, (span // (IN_OCTAVE * least)).bit_length() - 1))


def most_leaves(segment: Segment, least: int) -> int:
    """The most leaves that the keys of one tile's queries can lie in, by what the host knows."""
    octaves, capacity = octaves_of(segment.span, least), segment.pages.capacity
    whole = leaves_before(capacity, octaves, least)
    if segment.span is None:
        return whole
    near = segment.span + segment.max_seqlen_q + least  # keys that may lie across the border of one leaf more
    return min(whole, leaves_before(near, octaves, least) + 1)


def leaves_before(position: int, octaves: int, least: int) -> int:
    """How many leaves begin before a position; at least 1.  `states_triton.leaf_of` is the same for the kernels."""
    leaves, first = 0, 0
    while first < position:
        first += least << min(leaves // IN_OCTAVE, octaves)
        leaves += 1
    return max(1, leaves)
