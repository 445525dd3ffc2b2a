"""The cache of multi-head latent attention (MLA, DeepSeek V2 and later, arXiv 2405.04434): one latent vector a token.

All heads share a token's latent.  A projection turns its first C numbers, which are stored normed, into every head's key and
value; its last R numbers are the rotated part of every head's key.  Attention treats the cache as one kv head whose key is the
whole latent and whose value is the latent's first C numbers.  This module knows slots, not the sequences that own them.

Shapes: T tokens, N slots, C latent rank, R rotary dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.attention.caches.planes import CacheLayout, Plane


@dataclass(frozen=True)
class MLAView:
    """One layer's latents.  latent: [num_slots, C + R], in the model's own dtype.  rank: C."""

    latent: Tensor
    rank: int

    def write(self, slots_T: Tensor, kv_T2KD: Tensor) -> None:
        raise TypeError("a latent cache takes no keys and values; layers use latent.mla.store_latent")

    def read(self, slots_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys [N, 1, C + R] and values [N, 1, C] of the slots (int64 [N]).  The values are a view of the keys."""
        k_N1X = self.latent.index_select(0, slots_N).to(dtype)[:, None]
        return k_N1X, k_N1X[..., : self.rank]


@dataclass(frozen=True)
class LatentLayout(CacheLayout):
    """rank, rope_dim: C and R.  dtype: the model's own."""

    rank: int
    rope_dim: int
    dtype: torch.dtype

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (Plane("latent", (self.rank + self.rope_dim,), self.dtype),)

    def view(self, layer: int, planes: Mapping[str, Tensor]) -> MLAView:
        return MLAView(planes["latent"], self.rank)
