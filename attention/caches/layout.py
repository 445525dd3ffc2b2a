"""What one slot of a cache holds: named buffers, from which a cache's bytes, moves and views follow.

A buffer is one tensor [layers that hold it, num_slots, *shape].  A layout lists a cache format's buffers and makes a layer's
view of them; it holds no memory itself.  A model whose layers have unlike heads has several (`UnlikeLayout`).  This module
knows no format: each format's layout stands beside its view.

Shapes: T tokens, K kv heads, D head dim, E value dim, N slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor


class CacheBuffer(NamedTuple):
    """What a buffer holds for every slot: one value, a vector or a matrix.  name: unique within a layout.  shape: of one slot.

    layers: the layers that hold the buffer, ascending; None: all of them.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    layers: tuple[int, ...] | None = None

    def held_by(self, layer: int) -> bool:
        """Whether that layer holds the buffer."""
        return self.layers is None or layer in self.layers

    @property
    def bytes(self) -> int:
        """Bytes of one slot."""
        return prod(self.shape) * self.dtype.itemsize


class KVView(Protocol):
    """One layer's part of a cache.  Every attention backend can read it by this method; kernels read a view's tensors.

    How a layer stores depends on what it keeps: each kind of view has a method of its own for that.
    """

    def read(self, slots_N: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys [N, K, D] and values [N, K, E] of the slots (int64 [N]), converted to that dtype."""


class HeadsView(KVView, Protocol):
    """A view of ordinary heads, whose keys and values have one width."""

    def write(self, slots_T: Tensor, kv_T2KD: Tensor) -> None:
        """Stores keys and values [T, 2, K, D], already normed and rotated, at the slots (int64 [T])."""


class CachedHeads(ABC):
    """One layer's ordinary heads as kernels read them.  int8_queries: whether attention rounds queries to int8 too."""

    int8_queries: bool = False

    @property
    @abstractmethod
    def heads(self) -> tuple[Tensor, Tensor]:
        """Stored keys and values, [num_slots, K, their width] each."""

    @property
    def quant(self) -> str:
        """The kv_cache_dtype of an 8-bit cache ("fp8", "int8" or "int8_keys"), or "" for another: kernels branch on it."""
        return ""

    @property
    def scales(self) -> Tensor:
        """A view without scales gives its keys: kernels need some pointer, and do not read it."""
        return self.heads[0]


@runtime_checkable
class LossyView(Protocol):
    """A view whose cache may quantise what it stores.  is_lossy: whether it does."""

    @property
    def is_lossy(self) -> bool: ...

    def as_stored(self, kept: Tensor) -> Tensor:
        """What the layer keeps of T tokens, as a later read of the cache would return it."""


class CacheLayout(ABC):
    """A cache format: what each slot of each layer holds, and how a layer reads and writes it."""

    @property
    @abstractmethod
    def buffers(self) -> tuple[CacheBuffer, ...]:
        """All that a slot of one layer holds."""

    @abstractmethod
    def view(self, layer: int, buffers: Mapping[str, Tensor]) -> KVView:
        """The view of one layer, for which a cache asks once.  buffers: by name, the layer's tensors [num_slots, *shape]."""

    def layer_bytes(self, layer: int) -> int:
        """Bytes of one token in that layer."""
        return sum(buffer.bytes for buffer in self.buffers if buffer.held_by(layer))


@dataclass(frozen=True)
class UnlikeLayout(CacheLayout):
    """Layers of several sizes: layers of one layout hold its buffers together, under names that end in its number.

    layouts: the layouts.  numbers: for each layer, which of them is its own.
    """

    layouts: tuple[CacheLayout, ...]
    numbers: tuple[int, ...]

    @property
    def buffers(self) -> tuple[CacheBuffer, ...]:
        return tuple(
            buffer._replace(name=f"{buffer.name} {number}", layers=self._holders(number, buffer))
            for number, layout in enumerate(self.layouts)
            for buffer in layout.buffers
        )

    def view(self, layer: int, buffers: Mapping[str, Tensor]) -> KVView:
        number = self.numbers[layer]
        own = self.layouts[number]
        return own.view(layer, {buffer.name: buffers[f"{buffer.name} {number}"] for buffer in own.buffers})

    def _holders(self, number: int, buffer: CacheBuffer) -> tuple[int, ...]:
        return tuple(layer for layer, own in enumerate(self.numbers) if own == number and buffer.held_by(layer))
