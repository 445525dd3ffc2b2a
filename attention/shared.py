"""Shared prefixes (cascade attention): pages that several sequences begin with are read once for all, as one more segment.

The shared pages form a single row that holds every query of the batch; each sequence's own segment then starts after them.
Which sequences share, and how many tokens, is read from tensors, so a captured graph stays right when that changes, also when
nothing is shared any more.

Shapes: B sequences (rows of a batch), n queries of each, W pages per sequence.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.attention.pages import PageTable
from specdec.attention.segment import Segment, uniform_cu_seqlens


class SharedPrefix(NamedTuple):
    """The pages that some rows of a batch have in common at their start.  These rows are called members.  All tensors are
    int32.

    length_1: how many tokens the shared pages hold; 0: nothing is shared.
    table_1W: the numbers of the shared pages.
    shared_B: how many of these tokens row b reads from the shared pages: length_1 for a member, 0 for any other row.
    unshared_B: length_1 - shared_B.
    max_queries: a threshold: passes with more queries a row read every row's own pages, because reading the shared pages once
        does not pay there.
    """

    length_1: Tensor
    table_1W: Tensor
    shared_B: Tensor
    unshared_B: Tensor
    max_queries: int

    @classmethod
    def empty(cls, page_table_BW: Tensor, max_queries: int) -> SharedPrefix:
        """A SharedPrefix for the rows of that page table (int32), in which no row shares anything."""
        rows = page_table_BW.shape[0]
        shared_B, unshared_B = page_table_BW.new_zeros(rows), page_table_BW.new_zeros(rows)
        return cls(page_table_BW.new_zeros(1), torch.zeros_like(page_table_BW[:1]), shared_B, unshared_B, max_queries)

    def narrow(self, rows: int) -> SharedPrefix:
        """Views of the first `rows` rows."""
        return self._replace(shared_B=self.shared_B[:rows], unshared_B=self.unshared_B[:rows])

    def set(self, members: list[int], pages: list[int], tokens: int) -> None:
        """Declares that the rows `members` begin with these pages, which hold `tokens` tokens, and that all others share
        nothing.
        """
        rows, device = self.shared_B.shape[0], self.table_1W.device
        pinned = device.type == "cuda"  # so that nobody waits
        numbers = torch.zeros(rows + len(pages), dtype=torch.int32, pin_memory=pinned, device="cpu")
        numbers[members] = tokens
        numbers[rows:] = torch.tensor(pages, dtype=torch.int32, device="cpu")
        numbers = numbers.to(device, non_blocking=True)
        self.length_1.fill_(tokens)
        self.table_1W[0, : len(pages)] = numbers[rows:]
        self.shared_B.copy_(numbers[:rows])
        self.unshared_B.copy_(tokens - numbers[:rows])


def split_shared(own: Segment, shared: SharedPrefix | None) -> tuple[Segment, ...]:
    """Splits a segment into one over the shared pages and one over each row's remaining pages; both together read the same
    keys.

    own: one row of n queries for each sequence; the row's table starts at the sequence's first page.
    The result is (own,) if shared is None, or if n is above shared.max_queries.
    A plan of the result must be given its queries' positions (positions_T).  They can't be derived from the plan's first
    segment, as `last_positions` would do: that segment is the shared row, and its last tokens are not the queries' own.
    """
    if shared is None or own.max_seqlen_q > shared.max_queries:
        return (own,)
    n, rows = own.max_seqlen_q, own.rows
    assert own.starts_T is None and own.base_B is None and shared.shared_B.shape[0] == rows
    once = Segment(
        pages=PageTable(shared.table_1W, own.pages.page_size),
        cache_seqlens=shared.length_1,
        cu_seqlens_q=uniform_cu_seqlens(1, rows * n, own.cache_seqlens.device),
        max_seqlen_q=rows * n,
        fresh="none",
        starts_T=_each(shared.unshared_B, n),  # a row that is no member starts at the row's end, so it reads none
        whole_or_none=True,
    )
    return once, replace(own, starts_T=_each(shared.shared_B, n))


def _each(x_B: Tensor, times: int) -> Tensor:
    """[B * times]: every element repeated `times` times."""
    return x_B if times == 1 else x_B[:, None].expand(-1, times).flatten()
