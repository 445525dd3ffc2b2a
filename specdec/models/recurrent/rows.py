"""How rows of recurrent layers' fused matrices lie in files and in memory, and rates of decay that can't be.

Shapes: N rows, V value heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.models.checkpoints.checkpoint import Checkpoint

MAX_RATE = 50  # of A_log: a rate of exp(50) a token forgets everything, and exp(89) is infinite in float32


def by_ranks(rows: Tensor, sizes: Sequence[int], ranks: int, order: Sequence[int] = ()) -> Tensor:
    """Rows of which those of a kind lie together: of each rank, its share of every kind.

    sizes: rows of each kind, in the file's order.  order: of kinds in memory; left out: the file's.
    """
    kinds = rows.split(list(sizes))
    own = [kinds[at] for at in order] if order else kinds
    return torch.cat([kind.unflatten(0, (ranks, -1)) for kind in own], dim=1).flatten(0, 1)


def expect_decays(checkpoint: Checkpoint, name: str, heads: int) -> None:
    """ValueError for a rate of decay whose exponential float32 can't hold, or almost; NaN and infinity are named later."""
    rates_V = checkpoint.take(name, (heads,))
    if checkpoint.has_data and (most := float(rates_V.float().nan_to_num(0, 0, 0).max())) > MAX_RATE:
        raise checkpoint.refuse(
            name, f"must hold logarithms of rates of decay, at most {MAX_RATE}, got {most:g}; a text's state would be "
            "forgotten at each token: was training or conversion broken?"
        )  # fmt: skip
