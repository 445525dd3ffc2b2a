"""A KV cache with keys in int8 and values in the model's own dtype ("int8_keys").

Every token and kv head has a float32 scale of its own for its key, so a token's quantised key depends on that key alone.  An
error in a key only shifts softmax weights; a value's error goes straight into the output, and here there is none.

A token's bytes lie head by head: a head's key, and after it the head's value.  Both begin at a multiple of ALIGNMENT bytes, so
that kernels can read either in the widest pieces.

Attention may round queries to int8 too, one scale a query and head: `int8_queries`.  It is a property of a view, because all
that reads a cache has to round alike: prefixes and suffixes, kernels and their definition.

This module knows no kernel.  Shapes: T tokens or queries, N slots, H heads, K kv heads, D head dim, X bytes of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from specdec.attention.caches.layout import CacheBuffer, CachedHeads, CacheLayout, KVView
from specdec.attention.caches.quant_cache import dequantised, to_int8

INT8_KEYS = "int8_keys"  # the kv_cache_dtype that asks for this cache
ALIGNMENT = 32  # with it, values of 16 bits begin a multiple of 16 values after their key, which compilers look for


def aligned(count: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-count // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Int8KeysView(CachedHeads):
    """One layer's keys and values.

    kv: [num_slots, K, X] uint8.
    scales_NK: the keys' scales, float32.
    head_dim, dtype: D, and the values' dtype.
    int8_queries: whether attention rounds queries to int8.
    """

    kv: Tensor
    scales_NK: Tensor
    head_dim: int
    dtype: torch.dtype
    int8_queries: bool = False
    is_lossy: ClassVar[bool] = True

    @cached_property
    def heads(self) -> tuple[Tensor, Tensor]:
        D, begin = self.head_dim, aligned(self.head_dim)
        return self.kv[..., :D].view(torch.int8), self.kv[..., begin : begin + D * self.dtype.itemsize].view(self.dtype)

    @property
    def quant(self) -> str:
        return INT8_KEYS

    @property
    def scales(self) -> Tensor:
        return self.scales_NK

    def write(self, slots_T: Tensor, kv_T2KD: Tensor) -> None:
        (k, v), (stored_TKD, scales_TK) = self.heads, to_int8(kv_T2KD[:, 0])
        k.index_copy_(0, slots_T, stored_TKD)
        v.index_copy_(0, slots_T, kv_T2KD[:, 1])
        self.scales_NK.index_copy_(0, slots_T, scales_TK)

    def read(self, slots_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        k_NKD, v_NKD = (x.index_select(0, slots_N) for x in self.heads)
        return dequantised(k_NKD, self.scales_NK.index_select(0, slots_N), dtype), v_NKD.to(dtype)

    def as_stored(self, kept: Tensor) -> Tensor:
        """These keys and values [T, 2, K, D] as a later read of the cache would return them."""
        k_TKD, v_TKD = kept.unbind(1)
        return torch.stack((dequantised(*to_int8(k_TKD), kept.dtype), v_TKD), dim=1)


def rounded_queries(q_THD: Tensor) -> Tensor:
    """Queries rounded to int8 and converted back."""
    return dequantised(*to_int8(q_THD), q_THD.dtype)


def queries_as_read(view: KVView, q_THD: Tensor) -> Tensor:
    """The queries by which attention multiplies this view's keys: as they are, or rounded to int8."""
    return rounded_queries(q_THD) if isinstance(view, CachedHeads) and view.int8_queries else q_THD


@dataclass(frozen=True)
class Int8KeysLayout(CacheLayout):
    """num_kv_heads, head_dim: K and D.  dtype: the model's own.  int8_queries: see Int8KeysView."""

    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    int8_queries: bool = False

    @property
    def buffers(self) -> tuple[CacheBuffer, ...]:
        head = aligned(self.head_dim) + aligned(self.head_dim * self.dtype.itemsize)
        return CacheBuffer("kv", (self.num_kv_heads, head), torch.uint8), CacheBuffer(
            "scales", (self.num_kv_heads,), torch.float32
        )

    def view(self, layer: int, buffers: Mapping[str, Tensor]) -> Int8KeysView:
        return Int8KeysView(buffers["kv"], buffers["scales"], self.head_dim, self.dtype, self.int8_queries)
