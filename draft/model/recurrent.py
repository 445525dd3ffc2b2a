"""The draft worker of a small model with recurrent layers: the same rounds, with states of the drafter's own by row.

A row's state holds all tokens that the drafter has read, the bonus token among them as the last of the pending path.  Each pass
of a draft runs over the whole tree so far, from the bonus token on, as the target's pass over a tree does: it reads the state
once, and writes the row's other number, which nobody reads.  So each node sees its own path alone, and a draft changes nothing.
An extend adds the accepted tokens as a chain, of which those that are real become the pending path.

Rereading the levels before costs few tokens of a small model, whose passes take as long as its weights.

Shapes: B sequences or parts of prompts, E extend rows, N nodes, K topk, T tokens, H hidden, V vocabulary of drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.attention.attend import PassTables
from specdec.batch.emitted import NewTokens
from specdec.batch.ragged import RaggedPrompts
from specdec.batch.state import BatchState
from specdec.batch.transfer import to_device
from specdec.batch.tree import DraftTree
from specdec.batch.trees.states import StateRows
from specdec.batch.trees.tables import tree_tables
from specdec.config import SpecConfig
from specdec.draft.drafter import DrafterContext
from specdec.draft.head import StepHead
from specdec.draft.model.worker import SmallModelWorker, after_parts
from specdec.draft.tree.build_tree import best_nodes
from specdec.draft.tree.expand import Candidates, expand, first_level
from specdec.models.recurrent.inputs import HybridPass
from specdec.models.recurrent.pool import StatePool
from specdec.ops.index import arange
from specdec.ops.recurrent.states import ChunkSteps, TreeSteps
from specdec.ops.rows import take_rows
from specdec.steps import Needs, RowEntry


class RecurrentModelWorker(SmallModelWorker):
    """pool: the states.  states: what the batch's rows know of them."""

    keeps_states = True

    def __init__(self, head: StepHead, context: DrafterContext) -> None:
        super().__init__(head, context)
        (config,), sizes = head.needs.models, context.states
        assert config.recurrent is not None and sizes is not None
        self.pool = StatePool(config.recurrent, config.recurrent_layers, *sizes, context.dtype, context.device)
        self.states = StateRows.empty(context.rows, sizes[2], context.device)

    def draft(self, state: BatchState, spec: SpecConfig, needs: Needs) -> DraftTree:
        S, K, B = spec.max_steps, spec.topk, state.rows
        noise, first = self.next_noise(state.lens_B, state.sampling, needs), self.rows_of(state)
        if K == 1:
            drawn = [state.bonus_B, first.level1_tokens_BK[:, 0]]
            for level in range(2, S + 1):
                logits_BV = self._logits(state, DraftTree.chain(torch.stack(drawn, dim=1)), 1)
                drawn.append(self.head.vocabulary.greedy(logits_BV, self.head.d2t_V, noise=noise and noise.at(level)))
            return DraftTree.chain(torch.stack(drawn, dim=1))
        candidates = Candidates.empty(B, K, S, state.lens_B.device)
        beam = first_level(candidates, *(t[:, :K].contiguous() for t in (first.level1_tokens_BK, first.level1_logp_BK)))
        tokens_BN, parents_BN = state.bonus_B[:, None], torch.zeros_like(state.bonus_B[:, None])
        for level in range(2, S + 1):
            before = max(0, 1 + K * (level - 3))  # the first node of the level before this pass's last one
            parents_BK = beam.parents_BK + before if level > 2 else torch.zeros_like(beam.tokens_BK)
            tokens_BN, parents_BN = torch.cat((tokens_BN, beam.tokens_BK), 1), torch.cat((parents_BN, parents_BK), 1)
            logits_RV = self._logits(state, DraftTree(tokens_BN, parents_BN, level - 1), K)
            beam = expand(candidates, level, beam, logits_RV, self.head.d2t_V, self.head.vocabulary, noise and noise.at(level))
        return best_nodes(candidates, state.bonus_B, spec.num_draft_tokens, S)

    def _logits(self, state: BatchState, tree: DraftTree, count: int) -> Tensor:
        """[B * count, V]: what follows each tree's last `count` nodes, of which node 0 is the bonus token."""
        tables = [tree_tables(state.of_group(group), tree) for group in self.cache.group_numbers]
        passes = [PassTables(each.plan, each.slots_BN.flatten()) for each in tables]
        steps = self.states.narrow(state.rows).tree_steps(state, tree)
        steps = steps._replace(count_B=(steps.count_B - 1).clamp(min=0))  # the bonus token is the tree's own
        hidden_TH = self._run(tree.tokens_BN, tables[0].positions_T, passes, steps)
        return self.head.logits(hidden_TH.unflatten(0, tree.tokens_BN.shape)[:, -count:].flatten(0, 1))

    def extend(self, state: BatchState, needs: Needs, new: NewTokens) -> None:
        (B, E), rows, states = new.tokens_BE.shape, self.rows_of(state), self.states.narrow(state.rows)
        base_lens_B = self.rows_before(new.base_lens_B)
        tables = [self.extend_tables(group, base_lens_B, E, last_rows=False) for group in self.groups(state)]
        positions_T = tables[0].plan.positions_T
        assert positions_T is not None
        steps = states.tree_steps(state, DraftTree.chain(new.tokens_BE))
        hidden_TH = self._run(new.tokens_BE, positions_T, tables, steps)
        states.commit(state, arange(E, new.last_B.device).expand(B, E).contiguous(), new.last_B)
        take_rows(hidden_TH.view(B, E, -1), new.last_B[:, None], out=rows.level1_hidden_BH[:, None])
        self.set_first_level(rows, self.next_noise(state.lens_B, state.sampling, needs))

    def _read_prompts(self, prompts: RaggedPrompts, next_ids_T: Tensor, features_TH: Tensor) -> Tensor:
        """As of SmallModelWorker.  The token after a part that does not end its prompt leaves no trace in a state."""
        tables, last_B = prompts.tables_of(self.cache.group_numbers), prompts.last_B
        self._run(prompts.ids_T, prompts.positions_T, tables, self.states.chunk_steps(prompts), last_B)
        self.states.ran(prompts)
        after = [after_parts(each, prompts.lens_B) for each in tables]
        positions_B = after[0].plan.positions_T
        assert positions_B is not None
        hidden_BH = self._run(next_ids_T.index_select(0, last_B), positions_B, after, self.states.next_steps(prompts))
        self.states.ran_next(prompts)
        return hidden_BH

    def _run(
        self, ids: Tensor, positions_T: Tensor, tables: list[PassTables], steps: TreeSteps | ChunkSteps,
        rows_R: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The final hidden states [T, H], or [R, H], of one pass."""
        attn = HybridPass(self.attention_of(tables), self.pool, steps)
        return self.head(ids.flatten(), positions_T, positions_T, attn, rows_R)

    def catch_up(self, state: BatchState, needs: Needs) -> None:
        has_some_B, states = self.rows_of(state).pending_B > 0, self.states.narrow(state.rows)
        before = [tensor.clone() for tensor in states.tensors()]
        super().catch_up(state, needs)
        for tensor, old in zip(states.tensors(), before, strict=True):
            tensor.copy_(torch.where(has_some_B.view(-1, *[1] * (tensor.dim() - 1)), tensor, old))

    def changed_rows(self, state: BatchState) -> list[Tensor]:
        return [*super().changed_rows(state), *self.states.narrow(state.rows).tensors()]

    def enter(self, entries: Sequence[RowEntry]) -> None:
        rows_R, states_R = to_device([(entry.row, entry.state) for entry in entries], self.states.numbers_B3.device).unbind(1)
        self.states.enter_rows(rows_R, states_R)

    def move_rows(self, sources_R: Tensor, targets_R: Tensor) -> None:
        super().move_rows(sources_R, targets_R)
        if sources_R.shape[0]:
            self.states.move_rows(sources_R, targets_R)
