"""What one recurrent layer hands to a pass, and the pass of a target that has such layers beside attention.

A layer calls the pass as attention layers do, with inputs of its own; so a model's code is one for both, and for training.
Each rule has inputs of its own, in a module beside this one, which knows no rule.

Shapes: as of ops/recurrent/states.py.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from specdec.attention.inputs import AttentionFn, DenseHeads, LayerCall, LayerInputs
from specdec.attention.kinds import PLAIN, Scoring
from specdec.models.recurrent.pool import StatePool
from specdec.ops.recurrent.conv import Convolution, chunk_convolution, convolved, tree_convolution
from specdec.ops.recurrent.states import ChunkSteps, LayerStates, RuleStates, TreeSteps


@dataclass
class RecurrentInputs(LayerInputs):
    """What the projections made of the pass's tokens.  x_TC: what the convolution reads.  conv: its weights."""

    x_TC: Tensor
    conv: Convolution

    def by_states(self, layer: LayerStates, steps: TreeSteps | ChunkSteps) -> Tensor:
        """The outputs of all tokens, [T, ..].  The layer's states go on by what is pending, and by the parts of prompts."""
        if isinstance(steps, TreeSteps):
            return self.over_trees(tree_convolution(self.x_TC, self.conv, layer.conv, steps), layer.rule, steps)
        return self.over_parts(chunk_convolution(self.x_TC, self.conv, layer.conv, steps), layer.rule, steps)

    def whole_rows(self, rows: int) -> Tensor:
        x_BNC = F.pad(self.x_TC.view(rows, -1, self.x_TC.shape[1]), (0, 0, self.conv.weight_ZC.shape[0] - 1, 0))
        return self.over_rows(convolved(x_BNC, self.conv)).flatten(0, 1)

    @abstractmethod
    def over_trees(self, y_TC: Tensor, memory: RuleStates | None, steps: TreeSteps) -> Tensor:
        """The outputs of trees' nodes, [T, ..].  y_TC: what the convolution made.  memory: None if the layer keeps no more."""

    @abstractmethod
    def over_parts(self, y_TC: Tensor, memory: RuleStates | None, steps: ChunkSteps) -> Tensor:
        """The outputs of parts of prompts, [T, ..]."""

    @abstractmethod
    def over_rows(self, y_BNC: Tensor) -> Tensor:
        """The outputs of whole rows, [B, N, ..], without states that anybody keeps; differentiable."""

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
        if not isinstance(inputs, RecurrentInputs):
            return self.attention(layer, inputs, rows_R, scoring)
        out_T = inputs.by_states(self.pool.layer(layer), self.steps)
        return out_T if rows_R is None else out_T.index_select(0, rows_R)
