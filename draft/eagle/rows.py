"""What an EAGLE head keeps of each row between rounds: the first level of its next tree, beside what paused rounds emitted.

Shapes: B rows, K topk, H hidden size of the head, P the most tokens of a pause, F width of a token's features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from specdec.draft.paused import PausedRows


@dataclass(frozen=True)
class EagleRows(PausedRows):
    """level1_tokens_BK: int64 ids of the target's vocabulary, the first level of the next tree, left by the last extend.

    level1_logp_BK: float32, the log-probabilities of these tokens.
    level1_hidden_BH: the head's hidden state from which they were computed.
    """

    level1_tokens_BK: Tensor
    level1_logp_BK: Tensor
    level1_hidden_BH: Tensor

    @classmethod
    def empty(
        cls,
        rows: int,
        topk: int,
        hidden: int,
        *,
        max_pause: int = 0,
        features: int = 0,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> Self:
        """topk, hidden: K and H.  dtype: of hidden states and features.  The others: as of `nothing_pending`."""
        return cls(
            # Distinct, because siblings are: rounds verify the trees of rows that never drafted, too.
            level1_tokens_BK=torch.arange(topk, dtype=torch.int64, device=device).repeat(rows, 1),
            level1_logp_BK=torch.zeros(rows, topk, dtype=torch.float32, device=device),
            level1_hidden_BH=torch.zeros(rows, hidden, dtype=dtype, device=device),
            **cls.nothing_pending(rows, max_pause, features, device, dtype),
        )
