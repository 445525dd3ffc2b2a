"""What a drafter keeps of rounds that were paused: tokens that it has not seen, and their features if it reads any.

Shapes: B rows, P the most tokens of a pause, F width of a token's features.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import torch
from torch import Tensor

from specdec.batch.emitted import NewTokens
from specdec.batch.state import BatchState
from specdec.draft.drafter import Drafter, Rows
from specdec.ops.index import arange
from specdec.steps import Needs


@dataclass(frozen=True)
class PausedRows(Rows):
    """pending_B: int64, how many tokens the drafter has not seen yet, because their rounds were paused; always 0 in a row that
        does not speculate.
    pending_tokens_BP: int64, these tokens.
    pending_features_BPF: for each of these tokens, the target's features of the token before it.
    """

    pending_B: Tensor
    pending_tokens_BP: Tensor
    pending_features_BPF: Tensor

    @staticmethod
    def nothing_pending(
        rows: int, max_pause: int, features: int, device: torch.device | str, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """These fields of rows that have missed nothing.  max_pause, features: P and F; 0 if no round is ever paused."""
        return {
            "pending_B": torch.zeros(rows, dtype=torch.int64, device=device),
            "pending_tokens_BP": torch.zeros(rows, max_pause, dtype=torch.int64, device=device),
            "pending_features_BPF": torch.zeros(rows, max_pause, features, dtype=dtype, device=device),
        }

    @property
    def next_draft(self) -> list[Tensor]:
        """The tensors that an extend leaves for the next draft: all others."""
        return self.tensors()[len(fields(PausedRows)) :]

    def keep(self, state: BatchState, new: NewTokens) -> None:
        """Records one token of a paused round in each row; see `Drafter.keep`."""
        rows_B = arange(state.rows, new.tokens_BE.device)
        self.pending_tokens_BP[rows_B, self.pending_B] = new.tokens_BE[:, 0]
        if new.features_BEF is not None:
            self.pending_features_BPF[rows_B, self.pending_B] = new.features_BEF[:, 0]
        self.pending_B.addcmul_(state.active_B, state.speculates_B)

    def kept(self, state: BatchState) -> NewTokens:
        """All tokens that were kept."""
        last_B = (self.pending_B - 1).clamp(min=0)
        return NewTokens(state.lens_B - self.pending_B.int(), self.pending_tokens_BP, last_B, self.pending_features_BPF)


Own = TypeVar("Own", bound=PausedRows)


class PausingDrafter(Drafter, Generic[Own]):
    """A drafter that keeps by row what paused rounds emitted, and learns it by one `extend`."""

    rows: Own

    def rows_of(self, state: BatchState) -> Own:
        """The rows of the state, which are the batch's first ones."""
        return self.rows.narrow(state.rows)

    def keep(self, state: BatchState, new: NewTokens) -> None:
        self.rows_of(state).keep(state, new)

    def catch_up(self, state: BatchState, needs: Needs) -> None:
        rows = self.rows_of(state)
        has_some_B = rows.pending_B > 0
        before = [tensor.clone() for tensor in rows.next_draft]
        self.extend(state, needs, rows.kept(state))
        for tensor, old in zip(rows.next_draft, before, strict=True):
            tensor.copy_(torch.where(has_some_B.view(-1, *[1] * (tensor.dim() - 1)), tensor, old))
        rows.pending_B.zero_()

    def changed_rows(self, state: BatchState) -> list[Tensor]:
        rows = self.rows_of(state)
        return [rows.pending_B, *rows.next_draft]

    def clear_rows(self, rows_R: Tensor) -> None:
        self.rows.pending_B.index_fill_(0, rows_R, 0)
