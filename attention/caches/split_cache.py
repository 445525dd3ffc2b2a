"""Keys and values of ordinary heads that differ in width, and pairs of ordinary heads as one head of twice the width.

This module knows slots, not the sequences that own them, and no kernel.

Shapes: T tokens, N slots, K kv heads, D key dim (head dim of an ordinary cache), E value dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.layout import CacheBuffer, CachedHeads, CacheLayout
from specdec.attention.caches.quant_cache import KV_CACHE_DTYPES, QuantHeads, QuantView, dequantised


@dataclass(frozen=True)
class SplitView(CachedHeads):
    """One layer's keys [slots, K, D] and values [slots, K, E], views of one row a token in the model's own dtype.

    rows: these rows, all keys and then all values [slots, K (D + E)]; None: both are views of something else.
    """

    k: Tensor
    v: Tensor
    rows: Tensor | None = None

    @classmethod
    def of(cls, rows: Tensor, num_kv_heads: int, key_dim: int) -> SplitView:
        """The view of such rows."""
        k, v = rows.tensor_split((num_kv_heads * key_dim,), dim=1)
        return cls(k.unflatten(1, (num_kv_heads, key_dim)), v.unflatten(1, (num_kv_heads, -1)), rows)

    @property
    def heads(self) -> tuple[Tensor, Tensor]:
        return self.k, self.v

    def write_heads(self, slots_T: Tensor, k_TKD: Tensor, v_TKE: Tensor) -> None:
        """Stores keys, already normed and rotated, and values at the slots (int64 [T])."""
        self.k.index_copy_(0, slots_T, k_TKD)
        self.v.index_copy_(0, slots_T, v_TKE)

    def read(self, slots_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        k_NKD, v_NKE = (x.index_select(0, slots_N).to(dtype) for x in (self.k, self.v))
        return k_NKD, v_NKE


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
    def buffers(self) -> tuple[CacheBuffer, ...]:
        return (CacheBuffer("kv", (self.num_kv_heads * (self.key_dim + self.value_dim),), self.dtype),)

    def view(self, layer: int, buffers: Mapping[str, Tensor]) -> SplitView:
        return SplitView.of(buffers["kv"], self.num_kv_heads, self.key_dim)


@dataclass
class QuantSplitView(QuantHeads):
    """One layer's keys [slots, K, D] and values [slots, K, E] in 8 bits, views of one row a token."""

    k: Tensor
    v: Tensor

    @property
    def heads(self) -> tuple[Tensor, Tensor]:
        return self.k, self.v

    def write_heads(self, slots_T: Tensor, k_TKD: Tensor, v_TKE: Tensor) -> None:
        """As of SplitView.  The first keys and values set fp8's scales, if the checkpoint has none."""
        if self.needs_scale:
            self.set_scale(k_TKD[:, None], v_TKE[:, None])
        for at, (kept, x) in enumerate(((self.k, k_TKD), (self.v, v_TKE))):
            stored, scales = self.quantise(x[:, None], at)
            kept.view(torch.uint8).index_copy_(0, slots_T, stored[:, 0].view(torch.uint8))
            if self.scales_N2K is not None:
                self.scales_N2K[:, at].index_copy_(0, slots_T, scales[:, 0])

    def read(self, slots_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        scales = self.scales[None] if self.scales_N2K is None else self.scales_N2K.index_select(0, slots_N)
        rows = [x.view(torch.uint8).index_select(0, slots_N).view(x.dtype) for x in self.heads]
        k_NKD, v_NKE = (dequantised(x, scales[:, at], dtype) for at, x in enumerate(rows))
        return k_NKD, v_NKE

    def as_stored(self, kept: Tensor) -> Tensor:
        """Rows [T, K D + K E] of keys and values as a later read of the cache would return them."""
        K, sizes = self.k.shape[1], [x.shape[1] * x.shape[2] for x in self.heads]
        parts = [x.unflatten(1, (K, -1))[:, None] for x in kept.split(sizes, dim=1)]
        read = [dequantised(*self.quantise(x, at), kept.dtype).flatten(1) for at, x in enumerate(parts)]
        return torch.cat(read, dim=1)


@dataclass(frozen=True)
class QuantSplitLayout(CacheLayout):
    """A token's K keys and then its K values in one row of 8-bit numbers.

    num_kv_heads, key_dim, value_dim: K, D and E.  The rest: as of QuantLayout.
    """

    kv_cache_dtype: str
    num_kv_heads: int
    key_dim: int
    value_dim: int
    device: torch.device | str = "cpu"
    scales: Sequence[Tensor | None] = ()
    int8_queries: bool = False

    @property
    def buffers(self) -> tuple[CacheBuffer, ...]:
        K = self.num_kv_heads
        kv = CacheBuffer("kv", (K * (self.key_dim + self.value_dim),), KV_CACHE_DTYPES[self.kv_cache_dtype])
        return (kv, CacheBuffer("scales", (2, K), torch.float32)) if self.kv_cache_dtype == "int8" else (kv,)

    def view(self, layer: int, buffers: Mapping[str, Tensor]) -> QuantSplitView:
        K = self.num_kv_heads
        k, v = buffers["kv"].split((K * self.key_dim, K * self.value_dim), dim=1)
        heads = k.unflatten(1, (K, self.key_dim)), v.unflatten(1, (K, self.value_dim))
        if self.kv_cache_dtype == "int8":
            return QuantSplitView(*heads, scales_N2K=buffers["scales"], int8_queries=self.int8_queries)
        scale_2K = torch.ones(2, K, dtype=torch.float32, device=self.device)
        given = self.scales[layer] if layer < len(self.scales) else None
        if given is not None:
            scale_2K.copy_(given)
        return QuantSplitView(*heads, scale_2K=scale_2K, needs_scale=given is None)


@dataclass(frozen=True)
class PairedView(CachedHeads):
    """One layer of an ordinary cache, kv [num_slots, 2, K, D], as differential attention reads it.

    It is only read: layers store through a view of ordinary heads over the same tensor.  Heads 2i and 2i + 1 are
    a pair.  The softmax of each of its two keys weighs the pair's two values side by side.
    quantised: that view, if it keeps 8 bits; each head then has its own scales.  None: the model's own dtype.
    int8_queries: see QuantView.
    """

    kv: Tensor
    quantised: QuantView | None = None
    int8_queries: bool = False

    @classmethod
    def of(cls, view: MHAView | QuantView) -> PairedView:
        """The pairs of a view of ordinary heads."""
        return cls(view.kv, view, view.int8_queries) if isinstance(view, QuantView) else cls(view.kv)

    @cached_property
    def heads(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the pairs, [num_slots, K / 2, 2 D] each: views.  A query reads one half of a pair's key."""
        k, v = self.kv.unflatten(2, (-1, 2)).flatten(3).unbind(1)
        return k, v

    @property
    def quant(self) -> str:
        return "" if self.quantised is None else self.quantised.quant

    @property
    def scales(self) -> Tensor:
        return self.kv if self.quantised is None else self.quantised.scales

    def read(self, slots_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys [N, K, D] and values [N, K, 2 D] of the slots (int64 [N])."""
        k_NKD, v_NKD = (MHAView(self.kv) if self.quantised is None else self.quantised).read(slots_N, dtype)
        return k_NKD, paired_values(v_NKD)


def paired_values(v_NKD: Tensor) -> Tensor:
    """[N, K, 2 D]: for each key head, the two values of its pair side by side."""
    return v_NKD.unflatten(1, (-1, 2)).flatten(2).repeat_interleave(2, dim=1)
