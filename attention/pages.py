"""Page tables: where the tokens of each sequence lie in a cache.  This module knows neither queries nor what is cached.

A page is `page_size` slots in a row, and a slot is one token's place.  The methods read nothing on the host, so they run inside
CUDA graphs; on a GPU a kernel computes `next_tokens`, whose definition stands here.

Shapes: B (or R) sequences, W table width, P positions of each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.ops.index import use_index_kernels


class NextTokens(NamedTuple):
    """The next P tokens of each sequence: positions and slots, int64, [B, P], or [P, B] if `by_step`.

    ends_PB: int32, how many keys each token may read: all keys before the token, and its own.
    """

    positions: Tensor
    slots: Tensor
    ends_PB: Tensor


class PageTable(NamedTuple):
    """The pages of each sequence, by position: the token at position p lies in page table[b, p // page_size].

    table: [R, W] int32 page numbers.  page_size: tokens per page; with 1 the numbers are slots.
    """

    table: Tensor
    page_size: int = 1

    @property
    def rows(self) -> int:
        """R, the number of sequences."""
        return self.table.shape[0]

    @property
    def capacity(self) -> int:
        """The most tokens that a row's pages hold."""
        return self.table.shape[1] * self.page_size

    def to(self, device: torch.device | str) -> PageTable:
        """The same pages, on that device."""
        return self._replace(table=self.table.to(device))

    def slots_at(self, positions_BP: Tensor) -> Tensor:
        """[B, P] int64: the cache slots of the given positions of each sequence."""
        pages_BP = self.table.gather(1, positions_BP // self.page_size)
        return pages_BP.long() * self.page_size + positions_BP % self.page_size

    def next_tokens(self, lens_B: Tensor, count: int, by_step: bool = False) -> NextTokens:
        """The next `count` tokens after the first lens_B (int32) of each sequence.

        by_step: the tokens are processed in `count` steps, one token of each sequence a step; the result is [P, B], so that
            each step's tokens are contiguous.
        """
        if use_index_kernels(lens_B):
            from specdec.attention.kernels.tables_triton import launch_next_tokens

            return NextTokens(*launch_next_tokens(self, lens_B, count, by_step))
        positions_PB = lens_B.long() + torch.arange(count, dtype=torch.int64, device=lens_B.device)[:, None]
        positions_BP = positions_PB.t().contiguous()
        slots_BP = self.slots_at(positions_BP)
        ends_PB = (positions_PB + 1).int()
        if by_step:
            return NextTokens(positions_PB, slots_BP.t().contiguous(), ends_PB)
        return NextTokens(positions_BP, slots_BP, ends_PB)
