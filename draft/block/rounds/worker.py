"""The worker of heads of one pass: a round's extend runs the head once, and its draft makes a tree of what the pass left.

This module knows heads and rounds; it knows neither requests nor the verifier.

Shapes: B sequences, S levels, H hidden.
"""

from __future__ import annotations

from torch import Tensor

from specdec.batch.emitted import NewTokens
from specdec.batch.ragged import RaggedPrompts
from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.config import SpecConfig
from specdec.draft.block.head import BlockHead
from specdec.draft.block.rounds.passes import PassPages
from specdec.draft.block.rounds.rows import BlockRows
from specdec.draft.drafter import DrafterContext
from specdec.draft.paused import PausingDrafter
from specdec.draft.shared_noise import noise_of
from specdec.ops.noise.gumbel import Noise
from specdec.steps import Needs


class BlockWorker(PausingDrafter[BlockRows]):
    """Runs a head of one pass over the running batch."""

    head: BlockHead

    def __init__(self, head: BlockHead, context: DrafterContext) -> None:
        self.head = head
        (self.cache,) = self.caches = context.caches
        self.run = head.make_pass(context.backend, self.cache, context.max_steps)
        self.groups = self.cache.group_numbers
        self.rows = BlockRows.empty(context, head.config.model.hidden_size, head.config.feature_size)

    def draft(self, state: BatchState, spec: SpecConfig, needs: Needs) -> DraftTree:
        """The next tree of every row, of the hidden states that the last extend or prefill left."""
        hidden_BSH = self.rows_of(state).hidden_BSH[:, : spec.max_steps]
        return self.head.tree(hidden_BSH, state.bonus_B, spec, self._noise(state, needs))

    def extend(self, state: BatchState, needs: Needs, new: NewTokens) -> None:
        self.run.after(new, state.lens_B, PassPages.of_rows(state, self.groups), self.rows_of(state).hidden_BSH)

    def prefill(self, state: BatchState, needs: Needs, prompts: RaggedPrompts, first_B: Tensor, features_TF: Tensor) -> None:
        self.rows.hidden_BSH.index_copy_(0, prompts.rows_B, self.run.prefill(state, prompts, first_B, features_TF))

    def _noise(self, state: BatchState, needs: Needs) -> Noise | None:
        """The noise of the tokens after the bonus tokens; None where the target adds none."""
        return noise_of(state.lens_B, state.sampling._replace(tables=None), needs) if needs.sampled else None
