"""What a head of one pass keeps of each row between rounds: the hidden states of its next drafts, beside what pauses kept.

Shapes: B rows, S the most tokens drafted, H hidden size of the head, P the most tokens of a pause, F width of a token's
features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from specdec.draft.drafter import DrafterContext
from specdec.draft.paused import PausedRows


@dataclass(frozen=True)
class BlockRows(PausedRows):
    """hidden_BSH: the hidden states of which the next draft's logits are made, left by the last extend."""

    hidden_BSH: Tensor

    @classmethod
    def empty(cls, context: DrafterContext, hidden: int, features: int) -> Self:
        """hidden, features: H and F."""

        def zeros(*shape: int, dtype: torch.dtype = context.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=context.device)

        return cls(
            pending_B=zeros(context.rows, dtype=torch.int64),
            pending_tokens_BP=zeros(context.rows, context.max_pause, dtype=torch.int64),
            pending_features_BPF=zeros(context.rows, context.max_pause, features),
            hidden_BSH=zeros(context.rows, context.most_steps, hidden),
        )
