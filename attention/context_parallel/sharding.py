"""Context parallelism: which rank keeps which token of a sequence, and in which slot of its cache.

A page table names pages that all ranks hold together: a page has D * P slots, of which each rank keeps P.  They go to the ranks
in turn, `interleave` at a time (vLLM's cp_kv_cache_interleave_size): with D = 2, P = 4 and an interleave of 2, slots 0 1 4 5 of
every page belong to rank 0 and slots 2 3 6 7 to rank 1.  Each page begins a new cycle of turns, so the same rule maps a
sequence's positions to ranks.  One page table therefore serves a sharded cache, and a cache that every rank keeps whole (the
drafter's).

This module does index arithmetic only; all_to_all.py has the exchange between ranks.

Shapes: B sequences, W table width, D ranks, P slots of a page that one rank keeps.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from specdec.attention.pages import PageTable
from specdec.limits import DUMMY_PAGE
from specdec.ops.index import use_index_kernels


class KVSharding(NamedTuple):
    """The tokens that rank `rank` of `ranks` keeps.  page_size: P.  interleave: adjacent slots of one rank; divides P."""

    rank: int
    ranks: int
    page_size: int
    interleave: int

    def local_pages(self, pages: PageTable) -> PageTable:
        """The same pages, with this rank's slots alone."""
        return PageTable(pages.table, self.page_size)

    def local_lens(self, lens_B: Tensor) -> Tensor:
        """[B] int32: of the first lens_B (int32) tokens of each sequence, how many this rank keeps, in adjacent slots of its
        own.
        """
        if use_index_kernels(lens_B):
            from specdec.attention.context_parallel.sharding_triton import launch_local_lens

            return launch_local_lens(self, lens_B)
        cycle = self.interleave * self.ranks
        return lens_B // cycle * self.interleave + (lens_B % cycle - self.rank * self.interleave).clamp(0, self.interleave)

    def keeps(self, positions: Tensor) -> Tensor:
        """Whether this rank keeps the tokens at these positions of their sequences; bool, of that shape."""
        return positions // self.interleave % self.ranks == self.rank

    def positions(self, local: Tensor) -> Tensor:
        """The positions of this rank's tokens of a sequence, which it numbers from 0 on."""
        run = self.interleave
        return local // run * (run * self.ranks) + self.rank * run + local % run

    def max_local(self, tokens: int) -> int:
        """The most of a sequence's first `tokens` tokens that any rank keeps."""
        return -(-tokens // (self.interleave * self.ranks)) * self.interleave

    def local_slots(self, slots: Tensor) -> Tensor:
        """Where this rank keeps the tokens of these slots (int64); slots of the dummy page for tokens of other ranks."""
        if use_index_kernels(slots):
            from specdec.attention.context_parallel.sharding_triton import launch_local_slots

            return launch_local_slots(self, slots, DUMMY_PAGE)
        cycle = self.interleave * self.ranks
        place = slots % (self.page_size * self.ranks)  # on its page
        page = (slots // (self.page_size * self.ranks)).where(place % cycle // self.interleave == self.rank, DUMMY_PAGE)
        return page * self.page_size + place // cycle * self.interleave + place % self.interleave
