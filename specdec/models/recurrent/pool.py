"""The states of all recurrent layers of a target, addressed by number (see ops/recurrent/states.py).

This module knows no sequence: who reads and writes which number is said by rows (specdec/batch/trees/states.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.limits import RESERVED_STATES, ZEROS
from specdec.models.recurrent.sizes import RecurrentConfig, state_dtype
from specdec.ops.recurrent.states import ConvStates, LayerStates, RuleStates


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
        places, rule = {layer: at for at, layer in enumerate(layers)}, config.rule

        def buffer(dtype: torch.dtype, rows: int, *shape: int) -> Tensor:
            # Uninitialised, as KVCache's: nobody may read a state that nobody has written.
            return torch.empty(len(places), rows, *shape, dtype=dtype, device=device)

        conv = ConvStates(
            buffer(dtype, numbers, config.taps - 1, config.channels), buffer(dtype, with_nodes, nodes, config.channels)
        )
        conv.conv_PWC[:, ZEROS] = 0
        self.buffers = LayerStates(conv, None)
        if rule is not None:
            wide, left = state_dtype(dtype), (with_nodes, nodes)
            states = RuleStates(
                buffer(wide, numbers, rule.value_heads, rule.key_width, rule.value_width),
                buffer(wide, *left, rule.key_heads, rule.key_width),
                buffer(wide, *left, rule.value_heads, rule.value_width),
                buffer(wide, *left, rule.value_heads, *(rule.key_width,) * rule.by_channel),
            )
            states.state_PHKV[:, ZEROS] = 0
            self.buffers = LayerStates(conv, states)
        self._views = {layer: _at(self.buffers, at) for layer, at in places.items()}

    @property
    def bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(tensor.nbytes for memory in self.buffers if memory is not None for tensor in memory)

    def layer(self, layer: int) -> LayerStates:
        """What the layer of that number keeps; the same object at every call."""
        return self._views[layer]


def _at(buffers: LayerStates, at: int) -> LayerStates:
    """One layer's part of all layers' buffers."""
    conv, rule = buffers
    return LayerStates(ConvStates(*(x[at] for x in conv)), None if rule is None else RuleStates(*(x[at] for x in rule)))
