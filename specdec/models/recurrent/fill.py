"""What loaders of hybrids have in common: convolutions, decays, rows of several kinds, and which layer is of which kind.

This file knows no family: names of tensors and words for errors are handed in.

Shapes: N rows, Z taps, C channels of a convolution, V value heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.models.checkpoints.checkpoint import Checkpoint, config_path
from specdec.models.checkpoints.loader import Arrange, copy_run
from specdec.models.config import ModelConfig
from specdec.models.linear import Stored
from specdec.parallel.shard import Shard

MAX_RATE = 50  # of A_log: a rate of exp(50) a token forgets everything, and exp(89) is infinite in float32


def by_ranks(rows: Tensor, sizes: Sequence[int], ranks: int, order: Sequence[int] = ()) -> Tensor:
    """Rows of which those of a kind lie together: of each rank, its share of every kind.

    sizes: rows of each kind, in the file's order.  order: of kinds in memory; left out: the file's.
    """
    kinds = rows.split(list(sizes))
    own = [kinds[at] for at in order] if order else kinds
    return torch.cat([kind.unflatten(0, (ranks, -1)) for kind in own], dim=1).flatten(0, 1)


def fill_taps(conv_ZC: Tensor, checkpoint: Checkpoint, name: str, shard: Shard, arrange: Arrange | None = None) -> None:
    """A rank's channels of a convolution, of the checkpoint's [C, 1, Z].  arrange: as of `copy_run`."""
    Z, C = conv_ZC.shape
    conv = Stored(conv_ZC.detach().t()[:, None], (C * shard.size, 1, Z), start=C * shard.rank)
    copy_run(conv, checkpoint, name, arrange)


def expect_rates(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> None:
    """ValueError for a rate of decay whose exponential float32 can't hold, or almost; NaN and infinity are named later."""
    rates_V = checkpoint.take(name, shape)
    if checkpoint.has_data and (most := float(rates_V.float().nan_to_num(0, 0, 0).max())) > MAX_RATE:
        raise checkpoint.refuse(
            name, f"must hold logarithms of rates of decay, at most {MAX_RATE}, got {most:g}; a text's state would be "
            "forgotten at each token: was training or conversion broken?"
        )  # fmt: skip


def expect_kinds(
    checkpoint: Checkpoint, config: ModelConfig, marks: tuple[str, str], words: tuple[str, str], keys: str
) -> None:  # fmt: skip
    """ValueError if a layer is of one kind by config.json and of the other by its tensors.

    marks: a tensor of each kind, of attention and of recurrent layers, below the layer's name.  words: what a config calls the
    kinds.  keys: those that say them.
    """
    for layer in range(config.num_layers):
        by_config = layer in config.recurrent_layers
        held = [f"model.layers.{layer}.{name}" in checkpoint for name in marks]
        if held[not by_config] and not held[by_config]:
            raise ValueError(
                f"{config_path(checkpoint.folder)}: layer {layer} is of {words[by_config]} by {keys}, but of "
                f"{words[not by_config]} by its tensors"
            )
