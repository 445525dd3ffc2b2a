"""Sequences that begin with the same pages read these once for all of them: one state more to merge.

The shared pages are one row that holds every query of the batch; each sequence's own segment then starts behind them.  Which
sequences share, and how much, is read from tensors: a captured graph stays right when that changes, also to nothing at all.

Shapes: B sequences (rows of a batch), n queries of each, W pages per sequence.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.attention.segment import Segment, uniform_cu_seqlens


class SharedPrefix(NamedTuple):
    """Pages that some rows of a batch begin with, the same ones, so that they can be read once for all of these rows.

    All int32.  length_1: their tokens; 0: there are none.  table_1W: their pages.  shared_B: the tokens that row b reads of
    them; all, or none if it is no member.  unshared_B: those that it does not, length_1 - shared_B.
    most_queries: of a row in one pass, up to which reading together is worth while; passes with more read as ever.
    """

    length_1: Tensor
    table_1W: Tensor
    shared_B: Tensor
    unshared_B: Tensor
    most_queries: int

    @classmethod
    def empty(cls, page_table_BW: Tensor, most_queries: int) -> SharedPrefix:
        """No row of that page table (int32) shares anything."""
        rows = page_table_BW.shape[0]
        shared_B, unshared_B = page_table_BW.new_zeros(rows), page_table_BW.new_zeros(rows)
        return cls(page_table_BW.new_zeros(1), torch.zeros_like(page_table_BW[:1]), shared_B, unshared_B, most_queries)

    def narrow(self, rows: int) -> SharedPrefix:
        """Views for the first rows."""
        return self._replace(shared_B=self.shared_B[:rows], unshared_B=self.unshared_B[:rows])

    def set(self, members: list[int], pages: list[int], tokens: int) -> None:
        """Rows that begin with these pages of so many tokens; all others share nothing."""
        shared_B = torch.zeros(self.shared_B.shape, dtype=torch.int32)
        shared_B[members] = tokens
        self.length_1.fill_(tokens)
        self.table_1W[0, : len(pages)] = torch.tensor(pages, dtype=torch.int32).to(self.table_1W.device)
        self.shared_B.copy_(shared_B)
        self.unshared_B.copy_(tokens - shared_B)


def split_shared(own: Segment, shared: SharedPrefix | None) -> tuple[Segment, ...]:
    """own: a row of n queries for each sequence, which reads its pages from key 0 on.  Returns what to read in its stead.

    With shared None, or more queries than it is meant for, just that.  A plan of what comes back says where its queries
    stand: its first row is nobody's end.
    """
    if shared is None or own.max_seqlen_q > shared.most_queries:
        return (own,)
    n, rows = own.max_seqlen_q, own.rows
    assert own.starts_T is None and own.base_B is None and shared.shared_B.shape[0] == rows
    once = Segment(
        page_table=shared.table_1W,
        cache_seqlens=shared.length_1,
        cu_seqlens_q=uniform_cu_seqlens(1, rows * n, own.cache_seqlens.device),
        max_seqlen_q=rows * n,
        page_size=own.page_size,
        starts_T=_each(shared.unshared_B, n),  # who is no member begins where the keys end
    )
    return once, replace(own, starts_T=_each(shared.shared_B, n))


def _each(x_B: Tensor, times: int) -> Tensor:
    """[B * times]: every element `times` times."""
    return x_B if times == 1 else x_B[:, None].expand(-1, times).flatten()
