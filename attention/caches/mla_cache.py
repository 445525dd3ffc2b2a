"""The cache of multi-head latent attention (MLA, DeepSeek V2 and later, arXiv 2405.04434): one latent vector a token.

All heads share a token's latent.  A projection turns its first C numbers, which are stored normed, into every head's key and
value; its last R numbers are the rotated part of every head's key.  Attention treats the cache as one kv head whose key is the
whole latent and whose value is the latent's first C numbers.  This module knows slots, not the sequences that own them.

Shapes: T tokens, N slots, C latent rank, R rotary dim, B sequences, E moved tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.attention.caches.kv_cache import move_slots
from specdec.attention.caches.latent_view import LatentParts, LatentView
from specdec.attention.kinds import FULL, LayerKind


@dataclass(frozen=True)
class MLAView(LatentView):
    """One layer of an MLACache.  latent: [num_slots, C + R], in the model's own dtype.  rank: C."""

    latent: Tensor
    rank: int

    @property
    def width(self) -> int:
        return self.latent.shape[1]

    def parts(self) -> LatentParts:
        return LatentParts(self.latent[:, : self.rank], self.latent[:, self.rank :])

    def put(self, slots_T: Tensor, latent_TL: Tensor) -> None:
        self.latent.index_copy_(0, slots_T, latent_TL)

    def latents(self, slots_N: Tensor, dtype: torch.dtype) -> Tensor:
        return self.latent.index_select(0, slots_N).to(dtype)


class MLACache:
    """The latents of all layers: [layers, num_slots, C + R] in the model's own dtype."""

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        rank: int,
        rope_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        kinds: Sequence[LayerKind] | None = None,
    ) -> None:
        self.kinds = tuple(kinds or [FULL] * num_layers)
        self.rank = rank
        # Uninitialised, like MHACache's memory: a backend must keep unread slots out of its products.
        self.latent = torch.empty(num_layers, num_slots, rank + rope_dim, dtype=dtype, device=device)

    @property
    def num_slots(self) -> int:
        return self.latent.shape[1]

    def view(self, layer: int) -> MLAView:
        return MLAView(self.latent[layer], self.rank)

    def move(self, slots_BN: Tensor, path_BE: Tensor) -> None:
        move_slots(self.latent, slots_BN, path_BE)
