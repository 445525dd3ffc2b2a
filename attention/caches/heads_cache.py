"""The cache of multi-head and grouped-query attention: keys and values in the model's own dtype.

A token's key and value lie side by side, so a token is stored, moved and gathered in one piece.  This module knows no kernel.

Shapes: T tokens, N slots, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specdec.attention.caches.layout import CacheBuffer, CachedHeads, CacheLayout


@dataclass(frozen=True)
class MHAView(CachedHeads):
    """One layer's keys and values.  kv: [num_slots, 2, K, D], keys then values, in the model's own dtype."""

    kv: Tensor

    @cached_property
    def heads(self) -> tuple[Tensor, Tensor]:
        k, v = self.kv.unbind(1)
        return k, v

    def write(self, slots_T: Tensor, kv_T2KD: Tensor) -> None:
        self.kv.index_copy_(0, slots_T, kv_T2KD)

    def read(self, slots_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        kv = self.kv.index_select(0, slots_N).to(dtype)
        return kv[:, 0], kv[:, 1]


@dataclass(frozen=True)
class HeadsLayout(CacheLayout):
    """num_kv_heads, head_dim: K and D.  dtype: the model's own."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def buffers(self) -> tuple[CacheBuffer, ...]:
        return (CacheBuffer("kv", (2, self.num_kv_heads, self.head_dim), self.dtype),)

    def view(self, layer: int, buffers: Mapping[str, Tensor]) -> MHAView:
        return MHAView(buffers["kv"])
