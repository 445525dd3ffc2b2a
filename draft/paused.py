"""What a drafter with features keeps of rounds that were paused: tokens that it has not seen, and their features.

Shapes: B rows, P the most tokens of a pause, F width of a token's features.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specdec.batch.emitted import NewTokens
from specdec.batch.state import BatchState
from specdec.draft.drafter import Rows
from specdec.ops.index import arange


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

    def keep(self, state: BatchState, new: NewTokens) -> None:
        """Records one token of a paused round in each row; see `Drafter.keep`."""
        assert new.features_BEF is not None
        rows_B = arange(state.rows, new.tokens_BE.device)
        self.pending_tokens_BP[rows_B, self.pending_B] = new.tokens_BE[:, 0]
        self.pending_features_BPF[rows_B, self.pending_B] = new.features_BEF[:, 0]
        self.pending_B.addcmul_(state.active_B, state.speculates_B)

    def kept(self, state: BatchState) -> NewTokens:
        """All tokens that were kept."""
        last_B = (self.pending_B - 1).clamp(min=0)
        return NewTokens(state.lens_B - self.pending_B.int(), self.pending_tokens_BP, last_B, self.pending_features_BPF)
