"""What a drafter with features keeps of rounds that were paused: tokens that it has not seen, and their features.

Shapes: B rows, P the most tokens of a pause, F width of a token's features.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

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

    def keep(self, state: BatchState, tokens_B: Tensor, features_BF: Tensor) -> None:
        """Records one token of a paused round in each row; see `Drafter.keep`."""
        rows_B = arange(state.rows, tokens_B.device)
        self.pending_tokens_BP[rows_B, self.pending_B] = tokens_B
        self.pending_features_BPF[rows_B, self.pending_B] = features_BF
        self.pending_B.addcmul_(state.active_B, state.speculates_B)
