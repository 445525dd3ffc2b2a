"""The KV cache of one model, addressed by slot.  This module knows slots, not the sequences that own them, and no cache format.

Layers of one group have slots of their own: a slot number means one place in the layers of one group, and another place in
those of another group.

Shapes: B sequences, N slots of a sequence, E moved tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.attention.caches.layout import CacheLayout, KVView
from specdec.attention.kinds import LayerKind
from specdec.ops.index import use_index_kernels
from specdec.ops.operator import define, nothing_fake, use_operator


class KVCache:
    """What all layers of one model keep of each token.

    layout: the cache format.
    kinds: which keys each layer reads, one entry for each layer.  The cache holds nothing for layers that attend to none.
    num_slots: of each layer; with several groups, of each group's layers, by the group's number.
    groups: the group of each layer; None: all layers belong to group 0.
    kv_layers: for each layer, the layer whose keys and values it reads: itself, or an earlier layer that stores its own (KV
        sharing).  The cache holds nothing for a layer that reads another one's.  None: every layer stores its own.
    group_numbers: the groups to which any layer belongs, in ascending order.
    slots: of each layer of a group, by the group's number.
    buffers_of: by group and name, a buffer's tensor [layers of the group that hold it, num_slots, *shape].
    """

    def __init__(
        self,
        layout: CacheLayout,
        kinds: Sequence[LayerKind],
        num_slots: int | Sequence[int],
        *,
        groups: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
        kv_layers: Sequence[int] | None = None,
    ) -> None:
        self.layout, self.kinds = layout, tuple(kinds)
        layers = range(len(self.kinds))
        self.groups = (0,) * len(layers) if groups is None else tuple(groups)
        kv_layers = layers if kv_layers is None else kv_layers
        # The layers that store, in the order of the buffers.
        stored = sorted({source for layer, source in enumerate(kv_layers) if self.kinds[layer].attends})
        assert len(self.groups) == len(kv_layers) == len(layers) and all(kv_layers[layer] == layer for layer in stored)
        assert all(self.kinds[layer] == self.kinds[source] for layer, source in enumerate(kv_layers))
        assert all(self.groups[layer] == self.groups[source] for layer, source in enumerate(kv_layers))
        self.slots = slots = (num_slots,) if isinstance(num_slots, int) else tuple(num_slots)
        self.group_numbers = tuple(sorted(set(self.groups)))
        self.buffers_of: dict[int, dict[str, Tensor]] = {}
        views: dict[int, KVView] = {}
        for group in self.group_numbers:
            own = [layer for layer in stored if self.groups[layer] == group]
            # The memory stays uninitialised, so the system never commits pages that no request touches.  Unwritten slots may
            # hold NaN: a backend must keep slots that no query reads out of its products, since 0 * NaN is NaN.
            held = {buffer.name: [layer for layer in own if buffer.held_by(layer)] for buffer in layout.buffers}
            buffers = self.buffers_of[group] = {
                buffer.name: torch.empty(len(held[buffer.name]), slots[group], *buffer.shape, dtype=buffer.dtype, device=device)
                for buffer in layout.buffers
                if held[buffer.name]
            }
            for layer in own:
                parts = {name: x[held[name].index(layer)] for name, x in buffers.items() if layer in held[name]}
                views[layer] = layout.view(layer, parts)
        self._views = [views.get(source) for source in kv_layers]

    @property
    def buffers(self) -> dict[str, Tensor]:
        """By name, a buffer's tensor, in a cache whose layers all belong to one group."""
        (group,) = self.group_numbers
        return self.buffers_of[group]

    @property
    def bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(tensor.nbytes for buffers in self.buffers_of.values() for tensor in buffers.values())

    def view(self, layer: int) -> KVView:
        """What one layer reads of the cache; the same object at every call, and for all layers that share it."""
        view = self._views[layer]
        assert view is not None, f"layer {layer} keeps no keys"
        return view

    def move(self, slots_BN: Tensor, path_BE: Tensor, group: int = 0, targets_BE: Tensor | None = None) -> None:
        """Moves tokens within each sequence, in every layer of the group: the token at slot number path_BE[b, e] goes to slot
        number e, or to slot targets_BE[b, e] (int64).

        slots_BN: int64, the slots of each sequence by number.  No slot may belong to two sequences, except those of the dummy
            page, whose contents are never read.
        path_BE: int64 slot numbers.  The method reads all of a sequence's tokens before it writes any, so sources and targets
            may overlap.
        """
        for tensor in self.buffers_of[group].values():
            move_slots(tensor, slots_BN, path_BE, targets_BE)

    def keep(self, sources_T: Tensor, targets_T: Tensor, group: int = 0) -> None:
        """Copies tokens in every layer of the group, from their slots to others that hold none of them; both are int64."""
        first_T1 = torch.zeros_like(sources_T)[:, None]
        self.move(sources_T[:, None], first_T1, group, targets_T[:, None])

    def copy_pages(self, sources_N: Tensor, targets_N: Tensor, page_size: int, group: int) -> None:
        """Copies whole pages in every layer of the group: page targets_N[n] becomes what page sources_N[n] was before.

        Both are int64.  A cache without layers of that group has nothing to copy.  What follows the last whole page is a
        scratch.
        """
        for tensor in self.buffers_of.get(group, {}).values():
            whole = bytes_of(tensor)[:, : tensor.shape[1] // page_size * page_size]
            for layer in whole.unflatten(1, (-1, page_size)):  # one by one, so that little memory is taken meanwhile
                layer.index_copy_(0, targets_N, layer.index_select(0, sources_N))


def move_slots(x: Tensor, slots_BN: Tensor, path_BE: Tensor, targets_BE: Tensor | None = None) -> None:
    """`KVCache.move` for one tensor [layers, num_slots, ...]."""
    if use_operator(x):
        assert targets_BE is None, "traced passes keep whole sequences"
        MOVE(x, slots_BN, path_BE)
        return
    x = bytes_of(x)
    if use_index_kernels(x):  # the kernel copies elements of any dtype unchanged
        from specdec.attention.caches.move_triton import launch_move

        launch_move(x, slots_BN, path_BE, targets_BE)
        return
    targets_BE = slots_BN[:, : path_BE.shape[1]] if targets_BE is None else targets_BE
    x.index_copy_(1, targets_BE.flatten(), x.index_select(1, slots_BN.gather(1, path_BE).flatten()))


def bytes_of(x: Tensor) -> Tensor:
    """The tensor itself, or 8-bit values as bytes: neither Triton nor index_copy_ takes float8 on every device."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


MOVE = define("move(Tensor(a!) cache, Tensor slots, Tensor path) -> ()", move_slots, nothing_fake)
