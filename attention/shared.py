"""Sequences that begin with the same pages read these once for all of them: one state more to merge.

The shared pages are one row that holds every query of the batch; each sequence's own segment then starts behind them.  Which
sequences share, and how much, is read from tensors: a captured graph stays right when that changes, also to nothing at all.

Shapes: B sequences, n queries of each.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from specdec.attention.segment import Segment, uniform_cu_seqlens
from specdec.batch import SharedPrefix


def split_shared(own: Segment, shared: SharedPrefix | None) -> tuple[Segment, ...]:
    """own: a row of n queries for each sequence, which reads its pages from key 0 on.  Returns what to read in its stead.

    With shared None, just that.  A plan of what comes back says where its queries stand: its first row is nobody's end.
    """
    if shared is None:
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
