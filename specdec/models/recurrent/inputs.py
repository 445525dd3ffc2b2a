"""What one recurrent layer hands to a pass, and the pass of a target that has such layers beside attention.

A layer calls the pass as attention layers do, with inputs of its own; so a model's code is one for both, and for training.

Shapes: as of ops/recurrent/states.py.  E: a value's width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from specdec.attention.inputs import AttentionFn, DenseHeads, LayerCall, LayerInputs
from specdec.attention.kinds import PLAIN, Scoring
from specdec.models.recurrent.pool import StatePool
from specdec.models.recurrent.sizes import RecurrentConfig
from specdec.ops.recurrent.conv import chunk_convolution, convolved, tree_convolution
from specdec.ops.recurrent.gated_delta import Gates, chunk_outputs, row_outputs, tree_outputs
from specdec.ops.recurrent.states import ChunkSteps, LayerStates, TreeSteps


@dataclass
class GatedDeltaInputs(LayerInputs):
    """Projections of the pass's tokens, before the convolution.

    x_TC: queries of all key heads, their keys, values of all value heads.  weight_ZC: the convolution's.  config: its sizes.
    """

    x_TC: Tensor
    gates: Gates
    weight_ZC: Tensor
    config: RecurrentConfig

    def by_states(self, layer: LayerStates, steps: TreeSteps | ChunkSteps) -> Tensor:
        """[T, H, E]: the outputs of all tokens.  The layer's states go on by what is pending, and by the parts of prompts."""
        if isinstance(steps, TreeSteps):
            return tree_outputs(tree_convolution(self.x_TC, self.weight_ZC, layer, steps), self.gates, layer, steps)
        return chunk_outputs(chunk_convolution(self.x_TC, self.weight_ZC, layer, steps), self.gates, layer, steps)

    def whole_rows(self, rows: int) -> Tensor:
        x_BNC = F.pad(self.x_TC.view(rows, -1, self.x_TC.shape[1]), (0, 0, self.config.taps - 1, 0))
        sizes = self.config.key_heads, self.config.key_width, self.config.value_width
        return row_outputs(convolved(x_BNC, self.weight_ZC), self.gates, *sizes).flatten(0, 1)

    def paged(self, call: LayerCall) -> Tensor:
        raise AssertionError("a recurrent layer keeps no keys: its target's passes are hybrid ones")

    def dense(self) -> DenseHeads:
        raise AssertionError("a recurrent layer has no keys")


class HybridPass:
    """A pass's AttentionFn where some layers are recurrent.

    attention: of the other layers.  steps: which states the pass's sequences read and write.
    """

    def __init__(self, attention: AttentionFn, pool: StatePool, steps: TreeSteps | ChunkSteps) -> None:
        self.attention, self.pool, self.steps = attention, pool, steps

    def __call__(self, layer: int, inputs: LayerInputs, rows_R: Tensor | None = None, scoring: Scoring = PLAIN) -> Tensor:
        if not isinstance(inputs, GatedDeltaInputs):
            return self.attention(layer, inputs, rows_R, scoring)
        out_THE = inputs.by_states(self.pool.layer(layer), self.steps)
        return out_THE if rows_R is None else out_THE.index_select(0, rows_R)
