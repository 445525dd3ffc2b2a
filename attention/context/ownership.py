"""Which of several ranks keeps which token of a sequence, and in which slot of its cache.  Knows numbers only, no exchange.

Page tables name pages that all ranks hold together: a page has D * P slots, of which each rank keeps P.  These slots go to the
ranks by turns, `run` slots in a row: with D = 2, P = 4 and a run of 2, slots 0 1 4 5 of every page are rank 0's and slots
2 3 6 7 rank 1's.  Since a page begins where all turns end, the same holds of a sequence's positions.  One page table therefore
serves a cache that is divided, and a cache that every rank keeps whole (the drafter's).

Shapes: B sequences, W table width, D ranks, P slots of a page that one rank keeps.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from specdec.attention.pages import PageTable
from specdec.limits import DUMMY_PAGE
from specdec.ops.index import use_index_kernels


class Ownership(NamedTuple):
    """The tokens of rank `rank` among `ranks`.  page_size: P.  run: slots that a rank keeps in a row; divides P."""

    rank: int
    ranks: int
    page_size: int
    run: int

    def pages(self, pages: PageTable) -> PageTable:
        """The same pages, with this rank's slots alone."""
        return PageTable(pages.table, self.page_size)

    def counts(self, lens_B: Tensor) -> Tensor:
        """[B] int32: how many of the first lens_B (int32) tokens of each sequence this rank keeps, one slot after the other."""
        if use_index_kernels(lens_B):
            from specdec.attention.context.ownership_triton import launch_counts

            return launch_counts(self, lens_B)
        turn = self.run * self.ranks
        return lens_B // turn * self.run + (lens_B % turn - self.rank * self.run).clamp(0, self.run)

    def most(self, tokens: int) -> int:
        """The most of a sequence's first `tokens` tokens that any rank keeps."""
        return -(-tokens // (self.run * self.ranks)) * self.run

    def own_slots(self, slots: Tensor) -> Tensor:
        """Where this rank keeps the tokens of these slots (int64); slots of the dummy page for tokens of other ranks."""
        if use_index_kernels(slots):
            from specdec.attention.context.ownership_triton import launch_own_slots

            return launch_own_slots(self, slots, DUMMY_PAGE)
        turn = self.run * self.ranks
        place = slots % (self.page_size * self.ranks)  # on its page
        page = (slots // (self.page_size * self.ranks)).where(place % turn // self.run == self.rank, DUMMY_PAGE)
        return page * self.page_size + place // turn * self.run + place % self.run
