"""What a target's recurrent layers keep of a text: sizes and bytes.  This module knows no weights and no memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from specdec.parallel.shard import Shard

# What the kernels of a GPU take: heads from so many numbers on, and trees whose mutual products fit on the chip: of half as
# many nodes where a program has less shared memory than this.
MIN_STATE_WIDTH, MAX_STATE_NODES, SHARED_OF_MANY_NODES = 16, 128, 132 << 10


@dataclass(frozen=True)
class RuleSizes:
    """Of a rule, as one rank holds it.  Counts are in heads; a key head serves neighbouring value heads.

    key_width, value_width: numbers of a head.  by_channel: whether each channel of keys fades by itself; see rule.py.
    in_blocks: whether a GPU's kernels take widths that are any multiple of MIN_STATE_WIDTH, and not powers of two alone.
    """

    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    by_channel: bool = False
    in_blocks: bool = False

    @property
    def kinds(self) -> tuple[int, int, int]:
        """Channels of queries, of keys and of values, in this order."""
        keys = self.key_heads * self.key_width
        return keys, keys, self.outputs

    @property
    def outputs(self) -> int:
        """Numbers that the rule yields of a token."""
        return self.value_heads * self.value_width

    @property
    def decays(self) -> int:
        """Numbers of a token that say how states fade."""
        return self.value_heads * (self.key_width if self.by_channel else 1)

    def times(self, ranks: int) -> RuleSizes:
        """The sizes of the whole model, of which so many ranks hold a share like this one each."""
        return replace(self, key_heads=self.key_heads * ranks, value_heads=self.value_heads * ranks)

    def share(self, shard: Shard) -> RuleSizes:
        """One rank's share: some key heads, with the value heads that they serve."""
        return replace(self, key_heads=shard.share(self.key_heads), value_heads=shard.share(self.value_heads))


@dataclass(frozen=True)
class RecurrentConfig:
    """What recurrent layers keep, all alike.

    taps: inputs that the convolution reads, the token's own included.  rule: what comes after it.  width: the convolution's
    channels where there is no rule.
    """

    taps: int
    rule: RuleSizes | None = None
    width: int = 0

    def __post_init__(self) -> None:
        assert (self.rule is None) == (self.width > 0), self

    @property
    def channels(self) -> int:
        """Of the convolution: those of queries, keys and values, if there is a rule."""
        return self.width if self.rule is None else sum(self.rule.kinds)

    @property
    def outputs(self) -> int:
        """Numbers of a token that a layer yields before its output projection."""
        return self.width if self.rule is None else self.rule.outputs

    def misfit(self, ranks: int) -> str:
        """What so many ranks can't share evenly; empty if they can share all."""
        if self.rule is None:
            return f"{self.width} channels of recurrent layers" if self.width % ranks else ""
        return f"{self.rule.key_heads} key heads of recurrent layers" if self.rule.key_heads % ranks else ""

    def share(self, shard: Shard) -> RecurrentConfig:
        """What one rank keeps."""
        if self.rule is None:
            return replace(self, width=shard.share(self.width))
        return replace(self, rule=self.rule.share(shard))

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Of one state of one layer, with the inputs that its convolution looks back to.  dtype: the model's."""
        inputs = (self.taps - 1) * self.channels * dtype.itemsize
        return inputs if self.rule is None else inputs + self.rule.outputs * self.rule.key_width * state_dtype(dtype).itemsize

    def node_bytes(self, dtype: torch.dtype) -> int:
        """Of what a node of a tree leaves in one layer.  dtype: the model's."""
        inputs = self.channels * dtype.itemsize
        if self.rule is None:
            return inputs
        return inputs + (self.rule.kinds[1] + self.rule.outputs + self.rule.decays) * state_dtype(dtype).itemsize

    def __str__(self) -> str:
        if self.rule is None:
            return str(self.width)
        rule = self.rule
        return f"{rule.key_heads} of {rule.key_width}, {rule.value_heads} of {rule.value_width}"


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which states are kept and computed: float32, or wider if the model is."""
    return torch.promote_types(dtype, torch.float32)
