"""The cache of sparse latent attention (DeepSeek V3.2): one latent a token, and beside it the key of the layer's indexer.

The indexer scores all of its keys and chooses those tokens whose latents a query reads.  This module knows slots, not the
sequences that own them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from specdec.attention.caches.mla_cache import LatentLayout, MLAView
from specdec.attention.caches.planes import Plane


@dataclass(frozen=True)
class SparseLatentView(MLAView):
    """One layer's latents and indexer keys.  index_keys: [num_slots, index_dim], in the model's own dtype."""

    index_keys: Tensor


@dataclass(frozen=True)
class SparseLatentLayout(LatentLayout):
    """A LatentLayout with a second plane.  index_dim: the dim of the indexer's heads."""

    index_dim: int

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (*super().planes, Plane("index_keys", (self.index_dim,), self.dtype))

    def view(self, layer: int, planes: Mapping[str, Tensor]) -> SparseLatentView:
        return SparseLatentView(planes["latent"], self.rank, planes["index_keys"])
