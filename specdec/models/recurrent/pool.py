"""The states of all recurrent layers of a target, addressed by number (see ops/recurrent/states.py).

This module knows no sequence: who reads and writes which number is said by rows (verify/states.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.limits import RESERVED_STATES, ZEROS
from specdec.models.recurrent.sizes import RecurrentConfig, state_dtype
from specdec.ops.recurrent.states import LayerStates


class StatePool:
    """layers: the numbers of the recurrent layers.  numbers, with_nodes: P and L of LayerStates; nodes: the most of one tree.

    dtype: the model's.
    """

    def __init__(
        self,
        config: RecurrentConfig,
        layers: Sequence[int],
        numbers: int,
        with_nodes: int,
        nodes: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        assert RESERVED_STATES <= with_nodes <= numbers
        wide, heads, places = state_dtype(dtype), config.value_heads, {layer: at for at, layer in enumerate(layers)}

        def buffer(rows: int, *shape: int, dtype: torch.dtype = wide) -> Tensor:
            # Uninitialised, as KVCache's: nobody may read a state that nobody has written.
            return torch.empty(len(places), rows, *shape, dtype=dtype, device=device)

        self.buffers = LayerStates(
            buffer(numbers, heads, config.key_width, config.value_width),
            buffer(numbers, config.taps - 1, config.channels, dtype=dtype),
            buffer(with_nodes, nodes, config.key_heads, config.key_width),
            buffer(with_nodes, nodes, heads, config.value_width),
            buffer(with_nodes, nodes, heads),
            buffer(with_nodes, nodes, config.channels, dtype=dtype),
        )
        for tensor in self.buffers[:2]:
            tensor[:, ZEROS] = 0
        self._views = {layer: LayerStates(*(tensor[at] for tensor in self.buffers)) for layer, at in places.items()}

    @property
    def bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(tensor.nbytes for tensor in self.buffers)

    def layer(self, layer: int) -> LayerStates:
        """What the layer of that number keeps; the same object at every call."""
        return self._views[layer]
