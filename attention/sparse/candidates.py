"""Which keys each query of a plan may select from, as the indexer needs it: made once a pass, shared by the pass's layers.

This module knows no scores and no kernels.

Shapes: T queries, R rows of a page table, W pages of a row, P nodes of a path.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.attention.pages import PageTable
from specdec.attention.segment import AttentionPlan, Segment


@dataclass(frozen=True)
class CandidateKeys:
    """The candidates of T queries.  Query t reads paged_T[t] keys through row rows_T[t] of the segment's page table, at the
    positions 0 to paged_T[t] - 1, and after them the first path_T[t] slots of its row in `suffix`.

    All tensors are int32.  path_T is 0 everywhere if there is no suffix.
    copy: where the segment's tokens lie for attention, if not on the segment's own pages, from which the indexer reads.
    """

    segment: Segment
    suffix: Segment | None
    rows_T: Tensor
    paged_T: Tensor
    path_T: Tensor
    copy: PageTable | None = None
    _counts: dict[int, Tensor] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """The most candidates that a query can have; the host knows it from the tables' widths."""
        paged = self.segment.pages.capacity
        return paged if self.suffix is None else paged + self.suffix.pages.capacity

    @property
    def pages(self) -> PageTable:
        """Where attention finds the selected keys of the segment."""
        return self.segment.pages if self.copy is None else self.copy

    @property
    def visible_T(self) -> Tensor:
        """int32: how many candidates each query has."""
        return self.paged_T + self.path_T

    def counts_T(self, topk: int) -> Tensor:
        """int32: how many of its candidates each query selects.  No layer's scores decide this, so the layers share it."""
        if topk not in self._counts:
            self._counts[topk] = self.visible_T.clamp(max=topk)
        return self._counts[topk]

    @classmethod
    def of(cls, plan: AttentionPlan, queries: int, copy: PageTable | None = None) -> CandidateKeys:
        """The candidates of a plan's queries, which are `queries` many.  Nothing is read from the device.

        plan: one paged segment, causal or a prefix, and perhaps a suffix: each query's own path in a draft tree, in the order
            of positions.
        Queries after the last row's (padding) have no candidates.
        """
        assert len(plan.segments) == 1, "the indexer reads one paged segment: shared prefixes are not split off"
        segment, suffix = plan.segments[0], plan.suffix
        assert segment.starts_T is None, "layers of sparse attention have no windows"
        assert suffix is None or (suffix.rows == queries and suffix.starts_T is None), "a suffix has a row for each query"
        cu_R1 = segment.cu_seqlens_q
        token_T = torch.arange(queries, dtype=torch.int32, device=cu_R1.device)
        found_T = torch.searchsorted(cu_R1, token_T, right=True, out_int32=True) - 1
        rows_T = found_T.clamp(0, segment.rows - 1)
        at_T = rows_T.long()
        paged_T = segment.cache_seqlens[at_T]
        if segment.causal:
            paged_T = paged_T - (cu_R1[at_T + 1] - 1 - token_T)
        paged_T = torch.where(found_T < segment.rows, paged_T.clamp(min=0), 0).int()
        path_T = torch.zeros_like(paged_T) if suffix is None else suffix.cache_seqlens.int()
        return cls(segment, suffix, rows_T, paged_T, path_T, copy)
