"""The cache of sparse latent attention (DeepSeek V3.2): a cache of latents, and beside each latent the key of the layer's
indexer.

The indexer scores all of its keys and selects the tokens whose latents a query reads.  This module knows slots, not the
sequences that own them, and not how latents are stored.

Shapes: T tokens, N slots, I dims of the indexer's heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.attention.caches.fp8_latent import Fp8LatentLayout
from specdec.attention.caches.latent_view import LatentView
from specdec.attention.caches.layout import CacheBuffer, CacheLayout
from specdec.attention.caches.mla_cache import LatentLayout

LatentFormat = LatentLayout | Fp8LatentLayout


@dataclass(frozen=True)
class SparseLatentView:
    """One layer's latents and indexer keys.

    index_keys: [num_slots, I], in the model's own dtype; None: the layer reads what an earlier layer's indexer selected.
    """

    latents: LatentView
    index_keys: Tensor | None

    @property
    def is_lossy(self) -> bool:
        return self.latents.is_lossy

    def as_stored(self, kept: Tensor) -> Tensor:
        """Latents [T, L] as a later read of the cache would return them."""
        return self.latents.as_stored(kept)

    def read(self, slots_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self.latents.read(slots_N, dtype)


@dataclass(frozen=True)
class SparseLatentLayout(CacheLayout):
    """latents: how latents are stored.  index_dim, dtype: I, and the dtype of the indexer's keys.

    index_layers: the layers that have an indexer; None: all of them.
    """

    latents: LatentFormat
    index_dim: int
    dtype: torch.dtype
    index_layers: tuple[int, ...] | None = None

    @property
    def buffers(self) -> tuple[CacheBuffer, ...]:
        return (*self.latents.buffers, CacheBuffer("index_keys", (self.index_dim,), self.dtype, self.index_layers))

    def view(self, layer: int, buffers: Mapping[str, Tensor]) -> SparseLatentView:
        return SparseLatentView(self.latents.view(layer, buffers), buffers.get("index_keys"))
