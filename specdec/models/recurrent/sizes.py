"""What a target's recurrent layers keep of a text: sizes and bytes.  This module knows no weights and no memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from specdec.parallel.shard import Shard

# What the kernels of a GPU take: heads a power of two wide, and trees whose mutual products fit on the chip: of half as many
# nodes where a program has less shared memory than this.
MIN_STATE_WIDTH, MAX_STATE_NODES, SHARED_OF_MANY_NODES = 16, 128, 132 << 10


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
        return sum(self.kinds)

    @property
    def kinds(self) -> tuple[int, int, int]:
        """Channels of queries, of keys and of values, in this order."""
        keys = self.key_heads * self.key_width
        return keys, keys, self.value_heads * self.value_width

    def times(self, ranks: int) -> RecurrentConfig:
        """The sizes of the whole model, of which so many ranks hold a share like this one each."""
        return replace(self, key_heads=self.key_heads * ranks, value_heads=self.value_heads * ranks)

    def share(self, shard: Shard) -> RecurrentConfig:
        """One rank's share: some key heads, with the value heads that they serve."""
        return replace(self, key_heads=shard.share(self.key_heads), value_heads=shard.share(self.value_heads))

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
