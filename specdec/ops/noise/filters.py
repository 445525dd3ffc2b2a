"""The filters of sampled rows: top-k, top-p and min-p, as columns of options.

Shapes: B sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Filters(NamedTuple):
    """The filters of B sequences.  temperature_B, top_p_B, min_p_B: float32.  top_k_B: int64, 0 keeps all tokens."""

    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor

    def expand_rows(self, rows: int) -> Filters:
        """A row for each of `rows` rows of logits; a sequence's rows are adjacent."""
        each = rows // self.top_k_B.shape[0]
        return Filters(*(column.repeat_interleave(each) for column in self))

    @property
    def safe_temperature_B(self) -> Tensor:
        """What logits are divided by: the temperature, or 1 in greedy rows, whose filters are not meant."""
        return torch.where(self.temperature_B > 0, self.temperature_B, 1.0)
