"""What a layer of the gated delta rule hands to a pass.

Shapes: as of ops/recurrent/states.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specdec.models.recurrent.inputs import RecurrentInputs
from specdec.models.recurrent.sizes import RuleSizes
from specdec.ops.recurrent.gated_delta import Gates, chunk_outputs, row_outputs, tree_outputs
from specdec.ops.recurrent.states import ChunkSteps, RuleStates, TreeSteps


@dataclass
class GatedDeltaInputs(RecurrentInputs):
    """x_TC: queries of all key heads, their keys, values of all value heads, each [H, V] of which is an output."""

    gates: Gates
    sizes: RuleSizes

    def over_trees(self, y_TC: Tensor, memory: RuleStates | None, steps: TreeSteps) -> Tensor:
        assert memory is not None
        return tree_outputs(y_TC, self.gates, memory, steps)

    def over_parts(self, y_TC: Tensor, memory: RuleStates | None, steps: ChunkSteps) -> Tensor:
        assert memory is not None
        return chunk_outputs(y_TC, self.gates, memory, steps)

    def over_rows(self, y_BNC: Tensor) -> Tensor:
        return row_outputs(y_BNC, self.gates, self.sizes.key_heads, self.sizes.key_width)
