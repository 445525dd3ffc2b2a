"""The cache of multi-head latent attention (MLA, DeepSeek V2 and later, arXiv 2405.04434): one latent vector a token.

All heads share a token's latent.  A projection turns its first C elements, which are stored normed, into every head's key and
value; its last R elements are the rotated part of every head's key.  Attention treats the cache as one kv head whose key is the
whole latent and whose value is the latent's first C elements.  This module knows slots, not the sequences that own them.

Shapes: T tokens, N slots, C latent rank, R rotary dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specdec.attention.caches.latent_view import LatentParts, LatentView
from specdec.attention.caches.layout import CacheBuffer, CacheLayout


@dataclass(frozen=True)
class MLAView(LatentView):
    """One layer's latents.  latent: [num_slots, C + R], in the model's own dtype.  rank: C."""

    latent: Tensor
    rank: int

    @property
    def width(self) -> int:
        return self.latent.shape[1]

    @cached_property
    def parts(self) -> LatentParts:
        return LatentParts(self.latent[:, : self.rank], self.latent[:, self.rank :])

    def put(self, slots_T: Tensor, latent_TL: Tensor) -> None:
        self.latent.index_copy_(0, slots_T, latent_TL)

    def latents(self, slots_N: Tensor, dtype: torch.dtype) -> Tensor:
        return self.latent.index_select(0, slots_N).to(dtype)


@dataclass(frozen=True)
class LatentLayout(CacheLayout):
    """rank, rope_dim: C and R.  dtype: the model's own."""

    rank: int
    rope_dim: int
    dtype: torch.dtype

    @property
    def buffers(self) -> tuple[CacheBuffer, ...]:
        return (CacheBuffer("latent", (self.rank + self.rope_dim,), self.dtype),)

    def view(self, layer: int, buffers: Mapping[str, Tensor]) -> MLAView:
        return MLAView(buffers["latent"], self.rank)
