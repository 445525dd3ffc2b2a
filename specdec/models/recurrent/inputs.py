"""What one recurrent layer hands to a pass, and the pass of a target that has such layers beside attention.

A layer calls the pass as attention layers do, with inputs of its own; so a model's code is one for both, and for training.
This module knows no rule: a layer says which one comes after its convolution.

Shapes: as of ops/recurrent/states.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from specdec.attention.inputs import AttentionFn, DenseHeads, LayerCall, LayerInputs
from specdec.attention.kinds import PLAIN, Scoring
from specdec.models.recurrent.pool import StatePool
from specdec.models.recurrent.sizes import RuleSizes
from specdec.ops.recurrent.conv import Convolution, chunk_convolution, convolved, tree_convolution
from specdec.ops.recurrent.rule import RecurrentRule
from specdec.ops.recurrent.states import ChunkSteps, LayerStates, TreeSteps


@dataclass
class RecurrentInputs(LayerInputs):
    """What the projections made of the pass's tokens.  Without a rule the convolution's outputs are the layer's, [T, C].

    x_TC: what the convolution reads: queries, keys and values, if there is a rule.  conv: its weights.
    """

    x_TC: Tensor
    conv: Convolution

    def by_states(self, layer: LayerStates, steps: TreeSteps | ChunkSteps) -> Tensor:
        """The outputs of all tokens, [T, ..].  The layer's states go on by what is pending, and by the parts of prompts."""
        if isinstance(steps, TreeSteps):
            return self.over_trees(tree_convolution(self.x_TC, self.conv, layer.conv, steps), layer, steps)
        return self.over_parts(chunk_convolution(self.x_TC, self.conv, layer.conv, steps), layer, steps)

    def whole_rows(self, rows: int) -> Tensor:
        x_BNC = F.pad(self.x_TC.view(rows, -1, self.x_TC.shape[1]), (0, 0, self.conv.weight_ZC.shape[0] - 1, 0))
        return self.over_rows(convolved(x_BNC, self.conv)).flatten(0, 1)

    def over_trees(self, y_TC: Tensor, layer: LayerStates, steps: TreeSteps) -> Tensor:
        """The outputs of trees' nodes.  y_TC: what the convolution made."""
        return y_TC

    def over_parts(self, y_TC: Tensor, layer: LayerStates, steps: ChunkSteps) -> Tensor:
        """The outputs of parts of prompts."""
        return y_TC

    def over_rows(self, y_BNC: Tensor) -> Tensor:
        """The outputs of whole rows, without states that anybody keeps; differentiable."""
        return y_BNC

    def paged(self, call: LayerCall) -> Tensor:
        raise AssertionError("a recurrent layer keeps no keys: its target's passes are hybrid ones")

    def dense(self) -> DenseHeads:
        raise AssertionError("a recurrent layer has no keys")


@dataclass
class RuleLayerInputs(RecurrentInputs):
    """Of a layer with a rule after its convolution, whose outputs are [T, H, V].  gates: as the rule's module has them."""

    rule: RecurrentRule
    gates: Any
    sizes: RuleSizes

    def by_states(self, layer: LayerStates, steps: TreeSteps | ChunkSteps) -> Tensor:
        if isinstance(steps, TreeSteps) and self.rule.convolved_trees is not None:
            return self.rule.convolved_trees(self.x_TC, self.conv, self.gates, layer, steps)
        return super().by_states(layer, steps)

    def over_trees(self, y_TC: Tensor, layer: LayerStates, steps: TreeSteps) -> Tensor:
        assert layer.rule is not None
        return self.rule.trees(y_TC, self.gates, layer.rule, steps)

    def over_parts(self, y_TC: Tensor, layer: LayerStates, steps: ChunkSteps) -> Tensor:
        assert layer.rule is not None
        return self.rule.parts(y_TC, self.gates, layer.rule, steps)

    def over_rows(self, y_BNC: Tensor) -> Tensor:
        return self.rule.rows(y_BNC, self.gates, self.sizes.key_heads, self.sizes.key_width)


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
