"""What a target's recurrent layers keep of a text: sizes and bytes.  This module knows no weights and no memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RecurrentConfig:
    """Layers of the gated delta rule, as one rank holds them.  Counts are in heads; a key head serves neighbouring value heads.

    key_width, value_width: numbers of a head.  taps: inputs that the convolution reads, the token's own included.
    """

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    taps: int

    @property
    def channels(self) -> int:
        """Of the convolution: those of queries, keys and values."""
        return 2 * self.key_heads * self.key_width + self.value_heads * self.value_width

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Of one state of one layer, with the inputs that its convolution looks back to.  dtype: the model's."""
        state = self.value_heads * self.key_width * self.value_width * state_dtype(dtype).itemsize
        return state + (self.taps - 1) * self.channels * dtype.itemsize

    def node_bytes(self, dtype: torch.dtype) -> int:
        """Of what a node of a tree leaves in one layer.  dtype: the model's."""
        left = self.key_heads * self.key_width + self.value_heads * (self.value_width + 1)
        return left * state_dtype(dtype).itemsize + self.channels * dtype.itemsize


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which states are kept and computed: float32, or wider if the model is."""
    return torch.promote_types(dtype, torch.float32)
