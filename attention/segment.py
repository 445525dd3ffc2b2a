"""What one attention kernel call reads.  Knows nothing of who asks, or of which kernel answers.

Shapes: R rows, W table width, T queries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.ops.index import kept


@dataclass(frozen=True)
class Segment:
    """Row r holds the queries cu_seqlens_q[r]:cu_seqlens_q[r+1]; each reads the row's first cache_seqlens[r] keys.

    page_table: [R, W] int32, page numbers.  With page_size 1 they are slots (one token's place each).
    cache_seqlens: [R] int32, keys readable in the row.
    cu_seqlens_q: [R + 1] int32, FlashAttention's cumulative query counts.
    max_seqlen_q: the most queries any row holds; host knowledge, so that nobody has to read the device.
    causal: query i of n reads keys up to cache_seqlens - n + i (bottom-right aligned, as in FlashAttention).
    page_size: tokens per page of page_table.
    """

    page_table: Tensor
    cache_seqlens: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    causal: bool = False
    page_size: int = 1

    @property
    def rows(self) -> int:
        return self.cache_seqlens.shape[0]

    @property
    def max_keys(self) -> int:
        """An upper bound on the keys of a row that needs no look at the device."""
        return self.page_table.shape[1] * self.page_size

    @classmethod
    def empty(cls, rows: int, width: int, queries_per_row: int, *, device: torch.device | str = "cpu") -> Segment:
        """Buffers for `rows` rows of slots; a builder fills them."""
        return cls(
            page_table=torch.zeros(rows, width, dtype=torch.int32, device=device),
            cache_seqlens=torch.zeros(rows, dtype=torch.int32, device=device),
            cu_seqlens_q=uniform_cu_seqlens(rows, queries_per_row, device),
            max_seqlen_q=queries_per_row,
        )

    @classmethod
    def of_slots(cls, slots_RW: Tensor, lens_R: Tensor) -> Segment:
        """One query a row, which reads the row's first slots.  Both int32."""
        return cls(slots_RW, lens_R, uniform_cu_seqlens(lens_R.shape[0], 1, lens_R.device), 1)

    def narrow(self, rows: int, width: int | None = None) -> Segment:
        """A view of the first `rows` rows (and `width` columns): a static buffer cut down to the running batch."""
        table = self.page_table[:rows] if width is None else self.page_table[:rows, :width]
        cu_seqlens_q = self.cu_seqlens_q[: rows + 1]
        return Segment(table, self.cache_seqlens[:rows], cu_seqlens_q, self.max_seqlen_q, self.causal, self.page_size)


@dataclass(frozen=True)
class AttentionPlan:
    """The segments of one attention call; their states are merged.  Every segment covers all T queries."""

    segments: tuple[Segment, ...]


@kept
def uniform_cu_seqlens(rows: int, queries_per_row: int, device: torch.device | str) -> Tensor:
    """[rows + 1] int32: every row holds the same number of queries.  Shared: not to be written to."""
    return torch.arange(0, rows * queries_per_row + 1, queries_per_row, dtype=torch.int32, device=device)
