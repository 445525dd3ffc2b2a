"""The KV cache of one model, addressed by slot.  This module knows slots, not the sequences that own them, and no cache format.

Shapes: B sequences, N slots of a sequence, E moved tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.attention.caches.planes import CacheLayout, KVView
from specdec.attention.kinds import LayerKind
from specdec.ops.index import use_index_kernels


class KVCache:
    """What all layers of one model keep of each token.

    layout: the cache format.
    kinds: which keys each layer reads, one entry for each layer.
    planes: by name, a plane's tensor [layers, num_slots, *shape].
    """

    def __init__(
        self, layout: CacheLayout, kinds: Sequence[LayerKind], num_slots: int, *, device: torch.device | str = "cpu"
    ) -> None:
        self.layout, self.kinds, self.num_slots = layout, tuple(kinds), num_slots
        # The memory stays uninitialised, so the system never commits pages that no request touches.  Unwritten slots may hold
        # NaN: a backend must keep slots that no query reads out of its products, since 0 * NaN is NaN.
        self.planes = {
            plane.name: torch.empty(len(self.kinds), num_slots, *plane.shape, dtype=plane.dtype, device=device)
            for plane in layout.planes
        }
        self._views = [
            layout.view(layer, {name: tensor[layer] for name, tensor in self.planes.items()})
            for layer in range(len(self.kinds))
        ]

    @property
    def bytes(self) -> int:
        """Bytes of all planes."""
        return sum(tensor.nbytes for tensor in self.planes.values())

    def view(self, layer: int) -> KVView:
        """One layer's part of the cache; the same object at every call."""
        return self._views[layer]

    def move(self, slots_BN: Tensor, path_BE: Tensor) -> None:
        """Moves tokens within each sequence, in every layer: the token at slot number path_BE[b, e] goes to slot number e.

        slots_BN: int64, the slots of each sequence by number.  No slot may belong to two sequences, except those of the dummy
            page, whose contents are never read.
        path_BE: int64 slot numbers.  The method reads all of a sequence's tokens before it writes any, so sources and targets
            may overlap.
        """
        for tensor in self.planes.values():
            move_slots(tensor, slots_BN, path_BE)


def move_slots(x: Tensor, slots_BN: Tensor, path_BE: Tensor) -> None:
    """`KVCache.move` for one tensor [layers, num_slots, ...]."""
    if x.dtype.itemsize == 1:  # as bytes: neither the kernel's language nor index_copy_ takes float8 on every device
        x = x.view(torch.uint8)
    if use_index_kernels(x):  # the kernel copies elements of any dtype unchanged
        from specdec.attention.caches.move_triton import launch_move

        launch_move(x, slots_BN, path_BE)
        return
    source_M, target_M = slots_BN.gather(1, path_BE).flatten(), slots_BN[:, : path_BE.shape[1]].flatten()
    x.index_copy_(1, target_M, x.index_select(1, source_M))
