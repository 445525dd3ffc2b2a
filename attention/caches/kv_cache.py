"""Where keys and values live: one tensor a model, addressed by slot.  Knows slots, not the sequences that own them.

Shapes: T tokens, K kv heads, D head dim, B sequences, N slots of a sequence, E moved tokens.  K and V of a token lie side
by side, so a token is stored, moved and gathered in one piece.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdec.attention.kinds import FULL, LayerKind
from specdec.ops.index import use_index_kernels


class KVView(Protocol):
    """What a cache shows one layer.  Backends with kernels of their own look closer; these two serve any."""

    def write(self, slots_T: Tensor, kv_T2KD: Tensor) -> None:
        """Stores keys and values, normed and rotated, at slots (int64)."""

    def read(self, slots_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys [N, K, D] and values [N, K, E] of slots (int64), as numbers of that dtype."""


class KVCache(Protocol):
    """Keys and values of all layers of one model, addressed by slot.  kinds: which keys each layer reads."""

    kinds: tuple[LayerKind, ...]

    @property
    def num_slots(self) -> int: ...
    def view(self, layer: int) -> KVView: ...
    def move(self, slots_BN: Tensor, path_BE: Tensor) -> None:
        """In every layer at once: the token at a sequence's slot number path_BE[b, e] goes to its slot number e.

        slots_BN: int64, no slot in two sequences (a dummy page's may be: they hold junk).  path_BE: int64.  Reads all of a
        sequence before it writes: the two may overlap.
        """


@dataclass(frozen=True)
class MHAView:
    """kv: [num_slots, 2, K, D], in the models' own dtype."""

    kv: Tensor

    def write(self, slots_T: Tensor, kv_T2KD: Tensor) -> None:
        self.kv.index_copy_(0, slots_T, kv_T2KD)

    def read(self, slots_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        kv = self.kv.index_select(0, slots_N).to(dtype)
        return kv[:, 0], kv[:, 1]


class MHACache:
    """[layers, num_slots, 2, K, D] in the models' own dtype."""

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        kinds: Sequence[LayerKind] | None = None,
    ) -> None:
        self.kinds = tuple(kinds or [FULL] * num_layers)
        # Empty: memory that no request touches is never committed.  Backends must not let unread slots into a product.
        self.kv = torch.empty(num_layers, num_slots, 2, num_kv_heads, head_dim, dtype=dtype, device=device)

    @property
    def num_slots(self) -> int:
        return self.kv.shape[1]

    def view(self, layer: int) -> MHAView:
        return MHAView(self.kv[layer])

    def move(self, slots_BN: Tensor, path_BE: Tensor) -> None:
        move_slots(self.kv, slots_BN, path_BE)


def move_slots(x: Tensor, slots_BN: Tensor, path_BE: Tensor) -> None:
    """`KVCache.move` of a tensor [layers, num_slots, ...]."""
    if use_index_kernels(x):  # it moves numbers as they are
        from specdec.attention.caches.move_triton import launch_move

        launch_move(x, slots_BN, path_BE)
        return
    source_M, target_M = slots_BN.gather(1, path_BE).flatten(), slots_BN[:, : path_BE.shape[1]].flatten()
    x.index_copy_(1, target_M, x.index_select(1, source_M))
