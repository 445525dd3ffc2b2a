"""The running batch as tensors: everything a round computes from.  Knows no request; rows are dense, padding is ordinary data.

Shapes: B rows, W pages per row, K topk, H draft hidden.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from specdec.pages import DUMMY_PAGE
from specdec.sampling import RowSampling


@dataclass(frozen=True)
class BatchState:
    """Row b is one running sequence; rows behind the running ones are padding: inactive, of length 0, on the dummy page.

    lens_B: int32, committed tokens (L).  bonus_B: int64, the last emitted token, whose KV is not written yet.
    active_B: int32, 1 for a running row; lengths of inactive rows don't grow.  page_table_BW: int32.
    temperature_B .. seed_B: see RowSampling.
    level1_tokens_BK (target ids), level1_logp_BK, level1_hidden_BH: the draft's first level, made by the last extend.
    """

    lens_B: Tensor
    bonus_B: Tensor
    active_B: Tensor
    page_table_BW: Tensor
    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    seed_B: Tensor
    level1_tokens_BK: Tensor
    level1_logp_BK: Tensor
    level1_hidden_BH: Tensor

    @classmethod
    def empty(
        cls, rows: int, pages: int, topk: int, draft_hidden: int, *, device: torch.device | str, dtype: torch.dtype
    ) -> BatchState:
        """A batch of padding.  topk and draft_hidden are 0 without a draft."""

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            lens_B=zeros(rows, dtype=torch.int32),
            bonus_B=zeros(rows, dtype=torch.int64),
            active_B=zeros(rows, dtype=torch.int32),
            page_table_BW=torch.full((rows, pages), DUMMY_PAGE, dtype=torch.int32, device=device),
            temperature_B=zeros(rows, dtype=torch.float32),
            top_k_B=zeros(rows, dtype=torch.int64),
            top_p_B=torch.ones(rows, device=device),
            seed_B=zeros(rows, dtype=torch.int64),
            level1_tokens_BK=zeros(rows, topk, dtype=torch.int64),
            level1_logp_BK=zeros(rows, topk, dtype=torch.float32),
            level1_hidden_BH=zeros(rows, draft_hidden, dtype=dtype),
        )

    @property
    def rows(self) -> int:
        return self.lens_B.shape[0]

    @property
    def sampling(self) -> RowSampling:
        return RowSampling(self.temperature_B, self.top_k_B, self.top_p_B, self.seed_B)

    def tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]

    def narrow(self, rows: int) -> BatchState:
        """Views of the first rows."""
        return BatchState(*(tensor[:rows] for tensor in self.tensors()))

    def pick(self, rows_R: Tensor) -> BatchState:
        """Copies of the given rows."""
        return BatchState(*(tensor.index_select(0, rows_R) for tensor in self.tensors()))

    def move_row(self, source: int, target: int) -> None:
        """Row `target` becomes what row `source` is."""
        for tensor in self.tensors():
            tensor[target] = tensor[source]

    def clear_row(self, row: int) -> None:
        """Makes the row padding.  Its other values may stay: inactive rows read and write the dummy page only."""
        self.active_B[row] = 0
        self.lens_B[row] = 0
        self.page_table_BW[row] = DUMMY_PAGE
        self.temperature_B[row] = 0
