"""The worker of assistants: a round's extend keeps one state of each row, and its draft grows the whole tree from it.

An assistant reads nothing but a row's last token, the target's state before that token, and keys that the target keeps.  So
prompts cost it nothing, and a paused round leaves nothing to catch up with.  All queries of a row read the same committed keys:
one plan serves every level.  This module knows trees and attention; it knows neither requests nor the verifier.

Shapes: B sequences, K topk, S levels, R = B * K branches, P parents of a sequence (1, then K), H hidden, F the target's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.attention.attend import PagedAttention, PassTables
from specdec.attention.plan import prefix_segment
from specdec.attention.segment import AttentionPlan
from specdec.attention.shared import split_shared
from specdec.batch.emitted import NewTokens
from specdec.batch.ragged import RaggedPrompts
from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.config import SpecConfig
from specdec.draft.assistant.head import Assistant
from specdec.draft.drafter import Drafter, DrafterContext, Rows
from specdec.draft.shared_noise import noise_of
from specdec.draft.tree.build_tree import best_nodes
from specdec.draft.tree.expand import Candidates, expand, first_level
from specdec.ops.noise.gumbel import Noise
from specdec.ops.rows import take_rows
from specdec.steps import Needs


@dataclass(frozen=True)
class AssistantRows(Rows):
    """feature_BF: the target's final hidden state of each row's last committed token."""

    feature_BF: Tensor


class AssistantWorker(Drafter):
    """Runs an assistant over the running batch."""

    rows: AssistantRows

    def __init__(self, head: Assistant, context: DrafterContext) -> None:
        self.head: Assistant = head
        self.backend, self.target_cache = context.backend, context.target_cache
        kept = torch.zeros(context.rows, head.feature_size, dtype=context.dtype, device=context.device)
        self.rows = AssistantRows(kept)

    def draft(self, state: BatchState, spec: SpecConfig, needs: Needs) -> DraftTree:
        noise = noise_of(state.lens_B, state.sampling._replace(tables=None), needs) if needs.sampled else None
        at_B, attn = self._root(state, 1)
        z_BH = self.head(state.bonus_B, self.rows.narrow(state.rows).feature_BF, at_B, attn)
        if spec.topk == 1:
            return self._draft_chain(state, spec.max_steps, z_BH, noise, at_B, attn)
        return self._draft_tree(state, spec, z_BH, noise)

    def _draft_chain(
        self, state: BatchState, levels: int, z_BH: Tensor, noise: Noise | None, at_B: Tensor, attn: PagedAttention
    ) -> DraftTree:
        head, drawn = self.head, [state.bonus_B]
        for level in range(1, levels + 1):
            if level > 1:
                z_BH = head(drawn[-1], head.recycled(z_BH), at_B, attn)
            drawn.append(head.vocabulary.greedy(head.logits(z_BH), noise=noise and noise.at(level)))
        return DraftTree.chain(torch.stack(drawn, dim=1))

    def _draft_tree(self, state: BatchState, spec: SpecConfig, z_BH: Tensor, noise: Noise | None) -> DraftTree:
        head, S, K, B = self.head, spec.max_steps, spec.topk, state.rows
        candidates = Candidates.empty(B, K, S, state.lens_B.device)
        logp_BK, tokens_BK = head.vocabulary.top(head.logits(z_BH), K, noise=noise)
        beam, z_BPH = first_level(candidates, tokens_BK, logp_BK), z_BH[:, None]
        at_R, attn = self._root(state, K)
        for level in range(2, S + 1):
            parents_RH = take_rows(z_BPH, beam.parents_BK.contiguous()).flatten(0, 1)
            z_RH = head(beam.tokens_BK.flatten(), head.recycled(parents_RH), at_R, attn)
            beam = expand(candidates, level, beam, head.logits(z_RH), None, head.vocabulary, noise and noise.at(level))
            z_BPH = z_RH.unflatten(0, (B, K))
        return best_nodes(candidates, state.bonus_B, spec.num_draft_tokens, S)

    def _root(self, state: BatchState, count: int) -> tuple[Tensor, PagedAttention]:
        """(the positions [R] of `count` queries of each row, all of them the root's; their attention, at any level)."""
        at_R = state.lens_B.long()
        at_R = at_R if count == 1 else at_R.repeat_interleave(count)
        tables = []
        for group in map(state.of_group, self.target_cache.group_numbers):
            prefix = split_shared(prefix_segment(group.pages, group.lens_B, count, "none"), group.shared)
            # The queries have no keys of their own, so a window ends with the row's last key.  No slot is written.
            tables.append(PassTables(AttentionPlan(prefix, at_R - 1), at_R))
        return at_R, PagedAttention(self.backend, self.target_cache, *tables)

    def extend(self, state: BatchState, needs: Needs, new: NewTokens) -> None:
        assert new.features_BEF is not None
        take_rows(new.features_BEF, new.last_B[:, None], out=self.rows.narrow(state.rows).feature_BF[:, None])

    def prefill(self, state: BatchState, needs: Needs, prompts: RaggedPrompts, first_B: Tensor, features_TF: Tensor) -> None:
        self.rows.feature_BF.index_copy_(0, prompts.rows_B, features_TF.index_select(0, prompts.last_B))

    def keep(self, state: BatchState, new: NewTokens) -> None:
        assert new.features_BEF is not None
        self.rows.narrow(state.rows).feature_BF.copy_(new.features_BEF[:, 0])

    def catch_up(self, state: BatchState, needs: Needs) -> None:
        pass  # the last token's state is all that there is to know

    def changed_rows(self, state: BatchState) -> list[Tensor]:
        return self.rows.narrow(state.rows).tensors()
