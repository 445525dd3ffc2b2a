"""Worlds for tests of sparse attention: plans over scattered pages, indexer keys that are NaN where nobody may read, and what
the kernels leave.

Shapes: T queries, H heads, D indexer dim, X slots, N candidates, B sequences, n queries of each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment, fill_tree_suffix, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.sparse.candidates import CandidateKeys
from specdec.attention.sparse.indexer import select_rows, to_slots
from toolkit.attention.caches import Scattered
from toolkit.attention.segments import ragged_causal_segment


@dataclass(frozen=True)
class IndexWorld:
    """One layer's indexer: queries, weights, the buffer of keys, and a plan."""

    q_THD: Tensor
    w_TH: Tensor
    keys_XD: Tensor
    plan: AttentionPlan

    @property
    def candidates(self) -> CandidateKeys:
        return CandidateKeys.of(self.plan, self.q_THD.shape[0])

    @classmethod
    def make(
        cls, kind: str, lens: list[int], n: int, page_size: int, *, heads: int = 4, dim: int = 8, distinct: int = 0,
        dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0,
    ) -> IndexWorld:  # fmt: skip
        """kind: causal, ragged (row b has 1 + b % n queries) or tree (n nodes after `lens` tokens, a fixed mask).
        distinct: if not 0, there are only so many different keys, so many scores tie.
        """
        extra = n if kind == "tree" else 0
        pages = Scattered(lens, page_size, extra=extra, spare=1, idle_is_dummy=True, seed=seed, device=device)
        keys_XD = pages.fill(dim, dtype=dtype)
        if distinct:
            of_X = torch.arange(pages.num_slots, device=device) * 7919 % distinct
            keys_XD = torch.where(keys_XD.isnan(), keys_XD, pages.randn(distinct, dim, dtype=dtype)[of_X])
        table = PageTable(pages.table_BW, page_size)
        counts = [1 + b % n for b in range(len(lens))] if kind == "ragged" else [n] * len(lens)
        if kind == "ragged":
            plan = AttentionPlan((ragged_causal_segment(table, counts, lens),))
        elif kind == "causal":
            plan = AttentionPlan((causal_segment(table, pages.lens_B, n),))
        else:
            mask_BNN = tree_mask(n).to(device).expand(len(lens), n, n)
            suffix = Segment.empty(len(lens) * n, n, 1, device=device)
            fill_tree_suffix(suffix, pages.fresh_slots(), mask_BNN)
            plan = AttentionPlan((prefix_segment(table, pages.lens_B, n),), suffix=suffix)
        T = sum(counts)
        return cls(pages.randn(T, heads, dim, dtype=dtype), pages.randn(T, heads), keys_XD, plan)

    def all_slots(self) -> tuple[Tensor, Tensor]:
        """(slots [T, N] int64 of every candidate, 0 after the last; visible [T] int32)."""
        c = self.candidates
        place_N = torch.arange(c.width, dtype=torch.int32, device=c.paged_T.device)
        every = torch.where(place_N < c.visible_T[:, None], place_N, -1)
        return self._slots(every)[0].long(), c.visible_T

    def scores(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """[T, N] by the definition in float64, NaN where nothing is visible."""
        slots_TN, visible_T = self.all_slots()
        rows = []
        for q_HD, w_H, slots_N, visible in zip(self.q_THD, self.w_TH, slots_TN, visible_T.tolist(), strict=True):
            products_HN = (q_HD.double() @ self.keys_XD[slots_N[:visible]].double().T * q_HD.shape[1] ** -0.5).relu()
            row_N = torch.full_like(slots_N, torch.nan, dtype=torch.float64)
            row_N[:visible] = w_H.double() @ products_HN
            rows.append(row_N)
        return torch.stack(rows).to(dtype)

    def segment_of(self, scores_TN: Tensor, topk: int) -> tuple[Tensor, Tensor]:
        """(slots, counts) that these scores select, by the definition."""
        return self._slots(select_rows(scores_TN, self.candidates.visible_T, topk))

    def _slots(self, positions_TI: Tensor) -> tuple[Tensor, Tensor]:
        c = self.candidates
        path = None if c.suffix is None else c.suffix.pages.table
        return to_slots(positions_TI, c.segment.pages, c.rows_T, c.paged_T, path)


def tree_mask(n: int) -> Tensor:
    """[n, n]: node i's parent is node (i - 1) // 2."""
    mask = torch.eye(n, dtype=torch.bool)
    for i in range(1, n):
        mask[i] |= mask[(i - 1) // 2]
    return mask


def same_rows(got: Segment, slots_TI: Tensor, counts_T: Tensor) -> None:
    """Asserts that a segment lists these slots, in this order."""
    assert torch.equal(got.cache_seqlens.long(), counts_T.long()), (got.cache_seqlens, counts_T)
    listed_TI = torch.arange(slots_TI.shape[1], device=slots_TI.device) < counts_T[:, None]
    wrong_TI = listed_TI & (got.pages.table != slots_TI)
    assert not wrong_TI.any(), wrong_TI.nonzero()[:10]
