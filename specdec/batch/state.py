"""The running batch as tensors: everything a round computes from.  Knows no request.

A row of the batch is one of three things, and `active_B` and `page_table_BW` say which:
- running: active, with its own pages; rounds read and write it;
- entering: its prompt is not complete; `prompt_table_BW` has its pages already, but for rounds it is padding;
- padding: inactive, of length 0, on the dummy page.  Rounds compute padding like any row, and nobody reads the result.

The last row of the runner's state is always padding: the padding of a prompt chunk is written there.

Shapes: B rows, W pages per row, K topk, H draft hidden, P tokens of a pause, F features.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from specdec.attention.shared import SharedPrefix
from specdec.batch.sampling import RowSampling
from specdec.limits import DUMMY_PAGE


@dataclass(frozen=True)
class BatchState:
    """The rows of a batch; views of the first rows are states too.

    lens_B: int32, committed tokens (L).  bonus_B: int64, the last emitted token, whose KV is not written yet.
    active_B: int32, 1 for a running row; lengths of inactive rows don't grow.
    page_table_BW: int32, what rounds go by.  prompt_table_BW: int32, the row's own pages, from the moment it enters.
    temperature_B .. seed_B: see RowSampling.
    level1_tokens_BK (target ids), level1_logp_BK, level1_hidden_BH: the draft's first level, made by the last extend.
    pending_B: int64, tokens that the drafter has not seen yet, because their rounds did not speculate; pending_tokens_BP and
    pending_features_BPF hold them, each with the target's features of the token before it.
    shared: what rows share, for rounds that make use of it; None: each row reads all of its own.
    """

    lens_B: Tensor
    bonus_B: Tensor
    active_B: Tensor
    page_table_BW: Tensor
    prompt_table_BW: Tensor
    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    seed_B: Tensor
    level1_tokens_BK: Tensor
    level1_logp_BK: Tensor
    level1_hidden_BH: Tensor
    pending_B: Tensor
    pending_tokens_BP: Tensor
    pending_features_BPF: Tensor
    shared: SharedPrefix | None = field(default=None, kw_only=True)

    @classmethod
    def empty(
        cls,
        rows: int,
        pages: int,
        topk: int,
        draft_hidden: int,
        *,
        max_pause: int = 0,
        features: int = 0,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> BatchState:
        """So many rows of padding.

        topk and draft_hidden are 0 without a drafter, max_pause and features if it never pauses.
        """

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def tables() -> Tensor:
            return torch.full((rows, pages), DUMMY_PAGE, dtype=torch.int32, device=device)

        return cls(
            lens_B=zeros(rows, dtype=torch.int32),
            bonus_B=zeros(rows, dtype=torch.int64),
            active_B=zeros(rows, dtype=torch.int32),
            page_table_BW=tables(),
            prompt_table_BW=tables(),
            temperature_B=zeros(rows, dtype=torch.float32),
            top_k_B=zeros(rows, dtype=torch.int64),
            top_p_B=torch.ones(rows, device=device),
            seed_B=zeros(rows, dtype=torch.int64),
            level1_tokens_BK=zeros(rows, topk, dtype=torch.int64),
            level1_logp_BK=zeros(rows, topk, dtype=torch.float32),
            level1_hidden_BH=zeros(rows, draft_hidden, dtype=dtype),
            pending_B=zeros(rows, dtype=torch.int64),
            pending_tokens_BP=zeros(rows, max_pause, dtype=torch.int64),
            pending_features_BPF=zeros(rows, max_pause, features, dtype=dtype),
        )

    @property
    def rows(self) -> int:
        return self.lens_B.shape[0]

    @property
    def sampling(self) -> RowSampling:
        return RowSampling(self.temperature_B, self.top_k_B, self.top_p_B, self.seed_B)

    @property
    def first_level(self) -> list[Tensor]:
        """What an extend leaves for the next draft."""
        return [self.level1_tokens_BK, self.level1_logp_BK, self.level1_hidden_BH]

    @property
    def shape(self) -> tuple[int, bool]:
        """What a graph captured over this state depends on besides its values."""
        return self.rows, self.shared is not None

    def tensors(self) -> list[Tensor]:
        """Of each row's own: all but what is shared."""
        return [getattr(self, each.name) for each in fields(self) if each.name != "shared"]

    def narrow(self, rows: int) -> BatchState:
        """Views of the first rows, each reading all of its own."""
        return BatchState(*(tensor[:rows] for tensor in self.tensors()))

    def sharing(self, shared: SharedPrefix) -> BatchState:
        """The same rows, with what they share."""
        return replace(self, shared=shared.narrow(self.rows))

    def keep_pending(self, tokens_B: Tensor, features_BF: Tensor) -> None:
        """Adds a round's one token and its features to what the drafter has yet to see."""
        rows_B = torch.arange(self.rows, device=tokens_B.device)
        self.pending_tokens_BP[rows_B, self.pending_B] = tokens_B
        self.pending_features_BPF[rows_B, self.pending_B] = features_BF
        self.pending_B.add_(self.active_B)

    def enter_rows(self, rows_R: Tensor, pages_Rw: Tensor, sampling: RowSampling) -> None:
        """Gives rows (int64) their first w pages, of any integer type, and their sampling, of any types."""
        self.prompt_table_BW.index_fill_(0, rows_R, DUMMY_PAGE)  # after its pages, a row must not name an earlier request's
        self.prompt_table_BW[:, : pages_Rw.shape[1]].index_copy_(0, rows_R, pages_Rw.int())
        for tensor, values_R in zip(self.sampling, sampling, strict=True):
            tensor.index_copy_(0, rows_R, values_R.to(tensor.dtype))

    def start_rows(self, rows_R: Tensor, lens_R: Tensor, last_R: Tensor, bonus_R: Tensor) -> None:
        """Prompts have run up to lens_R; where last_R is 1 they are complete, and the row runs from now on.

        rows_R: int64.  lens_R, last_R: int32.  bonus_R: int64, the first token of complete prompts.  Other rows stay padding.
        """
        self.lens_B.index_copy_(0, rows_R, lens_R * last_R)
        self.active_B.index_copy_(0, rows_R, last_R)
        self.bonus_B.index_copy_(0, rows_R, bonus_R)
        self.pending_B.index_fill_(0, rows_R, 0)
        own_RW = self.prompt_table_BW.index_select(0, rows_R)
        self.page_table_BW.index_copy_(0, rows_R, torch.where(last_R[:, None] > 0, own_RW, DUMMY_PAGE))

    def move_rows(self, sources_R: Tensor, targets_R: Tensor) -> None:
        """Each target row becomes what its source row was before (int64; no target twice)."""
        if sources_R.shape[0]:
            for tensor in self.tensors():
                tensor.index_copy_(0, targets_R, tensor.index_select(0, sources_R))

    def clear_rows(self, rows_R: Tensor) -> None:
        """Makes rows (int64) padding.  Their other values may stay: inactive rows read and write the dummy page only."""
        for tensor in (self.active_B, self.lens_B, self.pending_B, self.temperature_B):
            tensor.index_fill_(0, rows_R, 0)
        self.page_table_BW.index_fill_(0, rows_R, DUMMY_PAGE)
