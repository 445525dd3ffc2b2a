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
        device, dtype = context.device, context.dtype
        return cls(
            hidden_BSH=torch.zeros(context.rows, context.max_steps, hidden, dtype=dtype, device=device),
            **cls.nothing_pending(context.rows, context.max_pause, features, device, dtype),
        )
