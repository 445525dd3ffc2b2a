"""What a layer that is a convolution and no more hands to a pass.

Shapes: as of ops/recurrent/states.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specdec.models.recurrent.inputs import RecurrentInputs
from specdec.ops.recurrent.states import ChunkSteps, RuleStates, TreeSteps


@dataclass
class ShortConvolutionInputs(RecurrentInputs):
    """What the convolution makes is the output, [T, C]."""

    def over_trees(self, y_TC: Tensor, memory: RuleStates | None, steps: TreeSteps) -> Tensor:
        return y_TC

    def over_parts(self, y_TC: Tensor, memory: RuleStates | None, steps: ChunkSteps) -> Tensor:
        return y_TC

    def over_rows(self, y_BNC: Tensor) -> Tensor:
        return y_BNC
