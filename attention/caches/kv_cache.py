"""The KV cache: one tensor a model, addressed by slot.  This module knows slots, not the sequences that own them.

A token's key and value lie side by side, so a token is stored, moved and gathered in one piece.

Shapes: T tokens, K kv heads, D head dim, E value dim, B sequences, N slots (of a sequence, in `move`), E moved tokens (in
`move`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdec.attention.kinds import FULL, LayerKind
from specdec.ops.index import use_index_kernels
from specdec.ops.operator import define, use_operator


class KVView(Protocol):
    """One layer's part of a cache.  These two methods serve every attention backend; kernels also read a view's tensors."""

    def write(self, slots_T: Tensor, kv_T2KD: Tensor) -> None:
        """Stores keys and values [T, 2, K, D], already normed and rotated, at the slots (int64 [T])."""

    def read(self, slots_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys [N, K, D] and values [N, K, E] of the slots (int64 [N]), converted to that dtype."""


class KVCache(Protocol):
    """The keys and values of all layers of one model, addressed by slot.  kinds: which keys each layer reads."""

    kinds: tuple[LayerKind, ...]

    @property
    def num_slots(self) -> int: ...
    def view(self, layer: int) -> KVView: ...
    def move(self, slots_BN: Tensor, path_BE: Tensor) -> None:
        """Moves tokens within each sequence, in every layer: the token at slot number path_BE[b, e] goes to slot number e.

        slots_BN: int64, the slots of each sequence by number.  No slot may belong to two sequences, except those of the dummy
            page, whose contents are never read.
        path_BE: int64 slot numbers.  The method reads all of a sequence's tokens before it writes any, so sources and targets
            may overlap.
        """


@dataclass(frozen=True)
class MHAView:
    """One layer of an MHACache.  kv: [num_slots, 2, K, D], keys then values, in the model's own dtype."""

    kv: Tensor

    def write(self, slots_T: Tensor, kv_T2KD: Tensor) -> None:
        self.kv.index_copy_(0, slots_T, kv_T2KD)

    def read(self, slots_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        kv = self.kv.index_select(0, slots_N).to(dtype)
        return kv[:, 0], kv[:, 1]


class MHACache:
    """Keys and values of multi-head and grouped-query attention: kv [layers, num_slots, 2, K, D] in the model's own dtype."""

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
        # The memory stays uninitialised, so the system never commits pages that no request touches.  Unwritten slots may hold
        # NaN: a backend must keep slots that no query reads out of its products, since 0 * NaN is NaN.
        self.kv = torch.empty(num_layers, num_slots, 2, num_kv_heads, head_dim, dtype=dtype, device=device)

    @property
    def num_slots(self) -> int:
        return self.kv.shape[1]

    def view(self, layer: int) -> MHAView:
        return MHAView(self.kv[layer])

    def move(self, slots_BN: Tensor, path_BE: Tensor) -> None:
        move_slots(self.kv, slots_BN, path_BE)


def move_slots(x: Tensor, slots_BN: Tensor, path_BE: Tensor) -> None:
    """`KVCache.move` for one tensor [layers, num_slots, ...]."""
    if use_operator(x):
        MOVE(x, slots_BN, path_BE)
        return
    if use_index_kernels(x):  # the kernel copies elements of any dtype unchanged
        from specdec.attention.caches.move_triton import launch_move

        launch_move(x, slots_BN, path_BE)
        return
    source_M, target_M = slots_BN.gather(1, path_BE).flatten(), slots_BN[:, : path_BE.shape[1]].flatten()
    x.index_copy_(1, target_M, x.index_select(1, source_M))


def _move_fake(*_: object) -> None:
    return None


MOVE = define("move(Tensor(a!) cache, Tensor slots, Tensor path) -> ()", move_slots, _move_fake)
