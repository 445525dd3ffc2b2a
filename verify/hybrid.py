"""The verifier of targets that have recurrent layers beside attention.

It adds to the pass over keys which states are read and written, and keeps of a round's acceptance what the next pass adds to
the states first.  This module knows no rule of a layer.

Shapes: B rows, R some of them.
"""

from __future__ import annotations

from torch import Tensor

from specdec.attention.backend import Backend
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.inputs import AttentionFn
from specdec.batch.ragged import RaggedPrompts
from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.batch.trees.states import StateRows
from specdec.batch.trees.tables import TreeTables
from specdec.models.recurrent.inputs import HybridPass
from specdec.models.recurrent.pool import StatePool
from specdec.models.target import Target
from specdec.steps import Needs
from specdec.verify.accept import Accepted
from specdec.verify.verifier import TargetVerifier


class HybridVerifier(TargetVerifier):
    """pool: the states.  rows: those of the batch, that of padding included.  The rest is as of TargetVerifier.

    Such a target has no encoder, and its ranks keep whole sequences.
    """

    keeps_states = True

    def __init__(
        self, model: Target, cache: KVCache, backend: Backend, aux_layers: tuple[int, ...] | None, pool: StatePool,
        rows: StateRows,
    ) -> None:  # fmt: skip
        super().__init__(model, cache, backend, aux_layers)
        self.pool, self.rows = pool, rows

    def over_prompts(self, attention: AttentionFn, prompts: RaggedPrompts) -> AttentionFn:
        return HybridPass(attention, self.pool, self.rows.chunk_steps(prompts))

    def ran(self, prompts: RaggedPrompts) -> None:
        self.rows.ran(prompts)

    def over_trees(self, attention: AttentionFn, state: BatchState, tree: DraftTree) -> AttentionFn:
        return HybridPass(attention, self.pool, self.rows.narrow(state.rows).tree_steps(state, tree))

    def commit(self, tables: dict[int, TreeTables], state: BatchState, tree: DraftTree, accepted: Accepted) -> None:
        super().commit(tables, state, tree, accepted)
        self.rows.narrow(state.rows).commit(state, accepted.path_BE, accepted.accepted_B)

    def written(self, state: BatchState, needs: Needs) -> list[Tensor]:
        return [*super().written(state, needs), *self.rows.narrow(state.rows).tensors()]

    def enter_rows(self, rows_R: Tensor, states_R: Tensor) -> None:
        self.rows.enter_rows(rows_R, states_R)

    def move_rows(self, sources_R: Tensor, targets_R: Tensor) -> None:
        self.rows.move_rows(sources_R, targets_R)
