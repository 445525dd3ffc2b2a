"""What a layer of Kimi's delta rule hands to a pass.

Shapes: as of ops/recurrent/states.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specdec.models.recurrent.inputs import RecurrentInputs
from specdec.ops.recurrent.kimi_delta import KimiGates, chunk_outputs, row_outputs, tree_outputs
from specdec.ops.recurrent.states import ChunkSteps, RuleStates, TreeSteps


@dataclass
class KimiDeltaInputs(RecurrentInputs):
    """x_TC: queries of all heads, their keys, their values, each [H, V] of which is an output."""

    gates: KimiGates

    def over_trees(self, y_TC: Tensor, memory: RuleStates | None, steps: TreeSteps) -> Tensor:
        assert memory is not None
        return tree_outputs(y_TC, self.gates, memory, steps)

    def over_parts(self, y_TC: Tensor, memory: RuleStates | None, steps: ChunkSteps) -> Tensor:
        assert memory is not None
        return chunk_outputs(y_TC, self.gates, memory, steps)

    def over_rows(self, y_BNC: Tensor) -> Tensor:
        return row_outputs(y_BNC, self.gates)
