"""The draft worker: it grows a tree from the first level that the last extend left, and fills the drafter's KV cache.

Row i of a head's KV belongs to the pair (token i + 1, feature of token i).  L committed tokens therefore have L rows in the
drafter's cache, and the last of them holds the bonus token's embedding.  A drafter that keeps each token in its own slot
(`StepHead.own_slots`) has L + 1 rows, of which the last is the bonus token's.  A chain (K = 1) appends to these rows; in a tree
each branch has a suffix of its own (branches.py).

This module knows heads, trees and attention; it knows neither requests nor the verifier.

Shapes: B sequences, K topk, S num_steps, E = S + 1 extend rows, T tokens of ragged prompts, H hidden, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specdec.attention.attend import PagedAttention, PassTables
from specdec.attention.plan import causal_segment, prefix_segment
from specdec.attention.segment import AttentionPlan, last_positions
from specdec.attention.shared import split_shared
from specdec.batch.emitted import NewTokens
from specdec.batch.ragged import RaggedPrompts
from specdec.batch.sampling import RowSampling
from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.config import SpecConfig
from specdec.draft.drafter import DrafterContext
from specdec.draft.eagle.rows import EagleRows
from specdec.draft.head import StepHead
from specdec.draft.paused import PausingDrafter
from specdec.draft.shared_noise import noise_of
from specdec.draft.tree.branches import fork
from specdec.draft.tree.build_tree import best_nodes
from specdec.draft.tree.expand import Candidates, expand, first_level
from specdec.ops.index import arange
from specdec.ops.noise.gumbel import Noise
from specdec.ops.rows import take_rows
from specdec.steps import Needs

# Threshold in rows of an extend: up to this many, a pass takes as long as reading the weights, so rows that nobody needs cost
# nothing, and no second plan is made to leave them out.
FEW_ROWS = 64


class DraftWorker(PausingDrafter[EagleRows]):
    """Runs a head over the running batch.

    In each group of layers the head's cache has the same slots as the target's, so one page table a group serves both models.
    shares_noise: whether drafts are chosen with the target's own noise; the benchmark of that rule alone switches it off.
    """

    head: StepHead

    def __init__(self, head: StepHead, context: DrafterContext, shares_noise: bool = True) -> None:
        self.head, self.backend = head, context.backend
        self.topk = context.max_topk  # of the first level that rows keep
        self.shares_noise, self.few_rows = shares_noise, FEW_ROWS
        (self.cache,) = self.caches = context.caches
        self.rows = EagleRows.empty(
            context.rows,
            self.topk,
            head.hidden_size,
            max_pause=context.max_pause,
            features=head.feature_size,
            device=context.device,
            dtype=context.dtype,
        )

    def draft(self, state: BatchState, spec: SpecConfig, needs: Needs) -> DraftTree:
        """The next tree of every row.

        A tree of S levels takes S - 1 runs of the head: the root's children, level 1, are known already, because the last
        extend or prefill computed them.
        """
        noise = self.next_noise(state.lens_B, state.sampling, needs)
        return self._draft_chain(state, spec.max_steps - 1, noise) if spec.topk == 1 else self._draft_tree(state, spec, noise)

    def _draft_chain(self, state: BatchState, steps: int, noise: Noise | None) -> DraftTree:
        """A tree without branches.  Each step's token is the head's most likely one, so no scores are needed."""
        groups = self.groups(state)
        rows, first = [group.pages.next_tokens(group.lens_B, steps, by_step=True) for group in groups], self.rows_of(state)
        tokens_B, hidden_BH = first.level1_tokens_BK[:, 0], first.level1_hidden_BH
        drawn = [state.bonus_B, tokens_B]
        for step in range(steps):
            positions_B = rows[0].positions[step]
            tables = []
            for group, own in zip(groups, rows, strict=True):
                segment = causal_segment(group.pages, own.ends_PB[step], 1, "queries")
                plan = AttentionPlan(split_shared(segment, group.shared), positions_B)
                tables.append(PassTables(plan, own.slots[step]))
            hidden_BH, logits_BV = self.head.level(tokens_B, hidden_BH, positions_B, self.attention_of(tables))
            tokens_B = self.head.vocabulary.greedy(logits_BV, self.head.d2t_V, noise=noise and noise.at(step + 2))
            drawn.append(tokens_B)
        return DraftTree.chain(torch.stack(drawn, dim=1))

    def _draft_tree(self, state: BatchState, spec: SpecConfig, noise: Noise | None) -> DraftTree:
        """A branching tree.  Every branch of a level is one row of the head's batch; the best K of their K * K children
        continue.
        """
        S, K, B = spec.max_steps, spec.topk, state.rows
        device, groups, first = state.lens_B.device, self.groups(state), self.rows_of(state)
        prefixes = [split_shared(prefix_segment(group.pages, group.lens_B, K, "none"), group.shared) for group in groups]
        candidates = Candidates.empty(B, K, S, device)
        level1_tokens_BK, level1_logp_BK = (t[:, :K].contiguous() for t in (first.level1_tokens_BK, first.level1_logp_BK))
        beam = first_level(candidates, level1_tokens_BK, level1_logp_BK)
        hidden, ancestors = first.level1_hidden_BH, [torch.empty(B, 0, dtype=torch.int32, device=device)] * len(groups)
        for level in range(2, S + 1):
            rows = [
                fork(group.pages, group.lens_B, beam.parents_BK, hidden, paths)
                for group, paths in zip(groups, ancestors, strict=True)
            ]
            tables = [
                PassTables(AttentionPlan(prefix, own.positions_R, own.suffix), own.slots_R)
                for prefix, own in zip(prefixes, rows, strict=True)
            ]
            tokens_R = beam.tokens_BK.flatten()
            hidden, logits_RV = self.head.level(tokens_R, rows[0].hidden_RH, rows[0].positions_R, self.attention_of(tables))
            beam = expand(candidates, level, beam, logits_RV, self.head.d2t_V, self.head.vocabulary, noise and noise.at(level))
            ancestors = [own.suffix.pages.table for own in rows]
        return best_nodes(candidates, state.bonus_B, spec.num_draft_tokens, S)

    def extend(self, state: BatchState, needs: Needs, new: NewTokens) -> None:
        """Runs the head over the accepted tokens with true target features; keeps the next tree's first level.

        What the head computes for columns after new.last_B is never used.
        """
        (B, E), rows = new.tokens_BE.shape, self.rows_of(state)
        few, base_lens_B = B * E <= self.few_rows, self.rows_before(new.base_lens_B)
        tables = [self.extend_tables(group, base_lens_B, E, last_rows=not few) for group in self.groups(state)]
        self._read_round(rows, tables, new.tokens_BE, self._fused(new), new.last_B)
        self.set_first_level(rows, self.next_noise(state.lens_B, state.sampling, needs))

    def prefill(self, state: BatchState, needs: Needs, prompts: RaggedPrompts, first_B: Tensor, features_TF: Tensor) -> None:
        """Runs the head over parts of prompts, with the target's features [T, F], like `extend`."""
        hidden_BH = self._read_prompts(prompts, prompts.next_ids(first_B), self.head.fuse(features_TF))
        noise = self.next_noise(prompts.lens_B, state.sampling, needs, prompts.rows_B)
        logp_BK, tokens_BK = self.head.vocabulary.top(self.head.logits(hidden_BH), self.topk, self.head.d2t_V, noise=noise)
        for target, source in zip(self.rows.next_draft, (tokens_BK, logp_BK, hidden_BH), strict=True):
            target.index_copy_(0, prompts.rows_B, source)

    def _fused(self, new: NewTokens) -> Tensor:
        """[T, H]: what the head reads with emitted tokens."""
        assert new.features_BEF is not None
        return self.head.fuse(new.features_BEF.flatten(0, 1))

    def _read_round(
        self, rows: EagleRows, tables: list[PassTables], tokens_BE: Tensor, features_TH: Tensor, last_B: Tensor
    ) -> None:
        """Runs the head over emitted tokens and keeps each row's hidden state at column last_B.  features_TH: fused."""
        (B, E), positions_T, attn = tokens_BE.shape, tables[0].plan.positions_T, self.attention_of(tables)
        assert positions_T is not None
        inputs = tokens_BE.flatten(), features_TH, positions_T, attn
        if tables[0].rows_plan is None:
            hidden_TH = self.head(*inputs)
            take_rows(hidden_TH.view(B, E, -1), last_B[:, None], out=rows.level1_hidden_BH[:, None])
        else:
            rows.level1_hidden_BH.copy_(self.head(*inputs, last_B + arange(B, last_B.device, E)))

    def _read_prompts(self, prompts: RaggedPrompts, next_ids_T: Tensor, features_TH: Tensor) -> Tensor:
        """Runs the head over parts of prompts: the hidden state [B, H] of each part's last token.  features_TH: fused."""
        attn = self.attention_of(prompts.tables_of(self.cache.group_numbers))
        return self.head.begin(next_ids_T, features_TH, prompts.positions_T, attn, prompts.last_B)

    def groups(self, state: BatchState) -> list[BatchState]:
        """The batch as each group of the head's layers sees it: lens_B counts the rows of the drafter's cache."""
        state = replace(state, lens_B=self.rows_before(state.lens_B))
        return [state.of_group(group) for group in self.cache.group_numbers]

    def rows_before(self, lens_B: Tensor) -> Tensor:
        """How many rows the drafter's cache has where so many tokens are committed."""
        return lens_B + 1 if self.head.own_slots else lens_B

    def attention_of(self, tables: Sequence[PassTables]) -> PagedAttention:
        return PagedAttention(self.backend, self.cache, *tables)

    def extend_tables(self, state: BatchState, base_lens_B: Tensor, count: int, last_rows: bool) -> PassTables:
        """Where the `count` tokens after the first base_lens_B of each row stand, in the layers of state.group.

        last_rows: whether a plan is made for each row's last committed token alone, too.
        """
        rows = state.pages.next_tokens(base_lens_B, count)
        segment = causal_segment(state.pages, rows.ends_PB[-1], count, "queries")
        plan = AttentionPlan(split_shared(segment, state.shared), rows.positions.flatten())
        last_plan = None
        if last_rows:
            last = causal_segment(state.pages, state.lens_B, 1)
            last_plan = AttentionPlan(split_shared(last, state.shared), last_positions(last) if state.shared else None)
        return PassTables(plan, rows.slots.flatten(), last_plan)

    def next_noise(self, lens_B: Tensor, sampling: RowSampling, needs: Needs, rows_B: Tensor | None = None) -> Noise | None:
        """The noise of the next tree's first level, one position after the bonus token; None where the target adds none.

        rows_B: int64, the rows of `sampling` that are meant; None: all of them.
        """
        if not (needs.sampled and self.shares_noise):
            return None
        sampling = sampling._replace(tables=None)  # rules for single tokens, which drafts don't obey
        return noise_of(lens_B, sampling if rows_B is None else sampling.of_rows(rows_B), needs)

    def set_first_level(self, rows: EagleRows, noise: Noise | None) -> None:
        """Computes the next tree's first level, K tokens a row, from the hidden states in `rows`."""
        logits_BV = self.head.logits(rows.level1_hidden_BH)
        out = (rows.level1_logp_BK, rows.level1_tokens_BK)
        self.head.vocabulary.top(logits_BV, self.topk, self.head.d2t_V, out, noise)
