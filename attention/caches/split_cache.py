"""Keys and values of one layer as two tensors, each with strides, head counts and a width of its own.

Two kinds of layers need this: ordinary heads whose values are not as wide as their keys, and differential attention, where two
key heads share one value head of twice their width.  This module knows slots, not who owns them, and no kernel.

Shapes: T tokens, N slots, K key heads, V value heads, D key dim, E value dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specdec.attention.caches.planes import CacheLayout, Plane


@dataclass(frozen=True)
class SplitView:
    """One layer's keys [slots, K, D] and values [slots, V, E], in the model's own dtype.

    V divides K: the key heads i * K / V to (i + 1) * K / V - 1 share value head i.
    """

    k: Tensor
    v: Tensor

    def __post_init__(self) -> None:
        assert self.k.shape[0] == self.v.shape[0] and self.k.shape[1] % self.v.shape[1] == 0, (self.k.shape, self.v.shape)

    @property
    def heads(self) -> tuple[Tensor, Tensor]:
        """Keys and values."""
        return self.k, self.v

    def write(self, slots_T: Tensor, kv_T2KD: Tensor) -> None:
        raise TypeError("keys and values of different width are no single tensor; layers use write_heads")

    def write_heads(self, slots_T: Tensor, k_TKD: Tensor, v_TVE: Tensor) -> None:
        """Stores keys [T, K, D], already normed and rotated, and values [T, V, E] at the slots (int64 [T])."""
        self.k.index_copy_(0, slots_T, k_TKD)
        self.v.index_copy_(0, slots_T, v_TVE)

    def read(self, slots_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys [N, K, D] and values [N, K, E] of the slots (int64 [N]), shared value heads repeated."""
        k_NKD, v_NVE = (x.index_select(0, slots_N).to(dtype) for x in (self.k, self.v))
        share = self.k.shape[1] // self.v.shape[1]
        return k_NKD, v_NVE if share == 1 else v_NVE.repeat_interleave(share, dim=1)


@dataclass(frozen=True)
class SplitLayout(CacheLayout):
    """A token's K keys and then its K values in one row, so that a token is moved in one piece.

    num_kv_heads, key_dim, value_dim: K, D and E.  dtype: the model's own.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def planes(self) -> tuple[Plane, ...]:
        return (Plane("kv", (self.num_kv_heads * (self.key_dim + self.value_dim),), self.dtype),)

    def view(self, layer: int, planes: Mapping[str, Tensor]) -> SplitView:
        K = self.num_kv_heads
        k, v = planes["kv"].split((K * self.key_dim, K * self.value_dim), dim=1)
        return SplitView(k.unflatten(1, (K, self.key_dim)), v.unflatten(1, (K, self.value_dim)))


@dataclass(frozen=True)
class PairedView:
    """The same layer as pairs of heads side by side.  kv: [num_slots, 2, K, D] of an ordinary cache."""

    kv: Tensor

    @cached_property
    def heads(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the pairs, [num_slots, K / 2, 2 D] each.  A query reads one half of a key."""
        k, v = self.kv.unflatten(2, (-1, 2)).flatten(3).unbind(1)
        return k, v

    def write(self, slots_T: Tensor, kv_T2KD: Tensor) -> None:
        self.kv.index_copy_(0, slots_T, kv_T2KD)

    def read(self, slots_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys [N, K, D] and values [N, K, 2 D] of the slots (int64 [N])."""
        k_NKD, v_NKD = self.kv.index_select(0, slots_N).to(dtype).unbind(1)
        return k_NKD, v_NKD.unflatten(1, (-1, 2)).flatten(2).repeat_interleave(2, dim=1)
