"""The multi-step draft worker: grows a tree from the last extend's first level, and keeps the draft's KV in step.

The draft's KV row i belongs to pair (token i + 1, feature i), so L committed tokens have L draft rows, the bonus token's
embedding in the last.  A chain (K = 1) appends to the prefix; a tree's branches have suffixes of their own (`branches.py`).

Knows heads, trees and attention; neither requests nor the verifier.

Shapes: B sequences, K topk, S num_steps, E = S + 1 extend rows, T packed tokens, H hidden, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.attention.attend import PagedAttention
from specdec.attention.backend import Backend
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.plan import causal_segment, next_tokens, prefix_segment
from specdec.attention.segment import AttentionPlan, Segment, last_positions
from specdec.attention.shared import split_shared
from specdec.batch.packed import PackedPrompts
from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.config import SpecConfig
from specdec.draft.branches import fork
from specdec.draft.build_tree import best_nodes
from specdec.draft.eagle import DraftHead
from specdec.draft.expand import Candidates, expand, first_level
from specdec.ops.index import arange
from specdec.ops.rows import take_rows
from specdec.ops.topk import greedy_tokens, top_tokens

FEW_ROWS = 64  # of an extend: up to here what counts is reading the weights, and rows that nobody reads come for free


class DraftWorker:
    """Runs a head over the running batch.  Its cache has the target's slots: one page table serves both models."""

    def __init__(self, head: DraftHead, cache: KVCache, backend: Backend, topk: int, page_size: int) -> None:
        self.head, self.cache, self.backend = head, cache, backend
        self.topk, self.page_size = topk, page_size

    def draft(self, state: BatchState, spec: SpecConfig) -> DraftTree:
        """The next tree of every row.  S levels take S - 1 steps: the first came with the last extend."""
        return self._draft_chain(state, spec.max_steps - 1) if self.topk == 1 else self._draft_tree(state, spec)

    def _draft_chain(self, state: BatchState, steps: int) -> DraftTree:
        """Each step's token is the head's best; scores are not needed."""
        rows = next_tokens(state.page_table_BW, state.lens_B, steps, self.page_size, by_step=True)
        tokens_B, hidden_BH = state.level1_tokens_BK[:, 0], state.level1_hidden_BH
        drawn = [state.bonus_B, tokens_B]
        for step in range(steps):
            segment = causal_segment(state.page_table_BW, rows.ends_PB[step], 1, self.page_size)
            attn = self._attention(split_shared(segment, state.shared), rows.slots[step], rows.positions[step])
            hidden_BH = self.head(tokens_B, hidden_BH, rows.positions[step], attn)
            tokens_B = greedy_tokens(self.head.logits(hidden_BH), self.head.d2t_V)
            drawn.append(tokens_B)
        return DraftTree.chain(torch.stack(drawn, dim=1))

    def _draft_tree(self, state: BatchState, spec: SpecConfig) -> DraftTree:
        """Every branch of a level is one row of the head's batch; the best K of their K * K children go on."""
        S, K, B = spec.max_steps, self.topk, state.rows
        device = state.lens_B.device
        prefix = split_shared(prefix_segment(state.page_table_BW, state.lens_B, K, self.page_size), state.shared)
        candidates = Candidates.empty(B, K, S, device)
        beam = first_level(candidates, state.level1_tokens_BK, state.level1_logp_BK)
        hidden, ancestors = state.level1_hidden_BH, torch.empty(B, 0, dtype=torch.int32, device=device)
        for level in range(2, S + 1):
            rows = fork(state.page_table_BW, state.lens_B, beam.parents_BK, hidden, ancestors, self.page_size)
            attn = self._attention((*prefix, rows.suffix), rows.slots_R, rows.positions_R)
            hidden = self.head(beam.tokens_BK.flatten(), rows.hidden_RH, rows.positions_R, attn)
            beam = expand(candidates, level, beam, self.head.logits(hidden), self.head.d2t_V)
            ancestors = rows.suffix.page_table
        return best_nodes(candidates, state.bonus_B, spec.num_draft_tokens, S)

    def extend(self, state: BatchState, base_lens_B: Tensor, tokens_BE: Tensor, last_B: Tensor, features_BEF: Tensor) -> None:
        """Runs the head over the accepted tokens with true target features; leaves the next tree's first level in `state`.

        base_lens_B: int32 committed length before this round.  tokens_BE: the emitted tokens; columns behind last_B are
        padding whose rows nobody reads.  last_B: int64 column of the bonus token.  features_BEF: of the token before each.
        state.lens_B: the length up to and with that column.
        """
        B, E = tokens_BE.shape
        rows = next_tokens(state.page_table_BW, base_lens_B, E, self.page_size)
        segment = causal_segment(state.page_table_BW, rows.ends_PB[-1], E, self.page_size)
        features_TH = self.head.fuse(features_BEF.flatten(0, 1))
        positions_T, slots_T = rows.positions.flatten(), rows.slots.flatten()
        inputs = (tokens_BE.flatten(), features_TH, positions_T)
        segments = split_shared(segment, state.shared)
        if B * E <= FEW_ROWS:
            hidden_TH = self.head(*inputs, self._attention(segments, slots_T, positions_T))
            take_rows(hidden_TH.view(B, E, -1), last_B[:, None], out=state.level1_hidden_BH[:, None])
        else:
            last = causal_segment(state.page_table_BW, state.lens_B, 1, self.page_size)
            last_plan = AttentionPlan(split_shared(last, state.shared), last_positions(last) if state.shared else None)
            attn = PagedAttention(self.backend, self.cache, AttentionPlan(segments, positions_T), slots_T, last_plan)
            state.level1_hidden_BH.copy_(self.head(*inputs, attn, last_B + arange(B, last_B.device, E)))
        self._set_first_level(state)

    def prefill(self, state: BatchState, prompts: PackedPrompts, first_B: Tensor, features_TF: Tensor) -> None:
        """Extend over parts of prompts.  first_B: int64, the first output token of each prompt that ends here.

        Leaves each part's first level in its row of `state`; it counts where the prompt ends.
        """
        attn = PagedAttention(self.backend, self.cache, prompts.plan, prompts.slots_T, prompts.last_plan)
        next_ids_T = prompts.next_ids(first_B)
        hidden_BH = self.head(next_ids_T, self.head.fuse(features_TF), prompts.positions_T, attn, prompts.last_B)
        logp_BK, tokens_BK = top_tokens(self.head.logits(hidden_BH), self.topk, self.head.d2t_V)
        for target, source in zip(state.first_level, (tokens_BK, logp_BK, hidden_BH), strict=True):
            target.index_copy_(0, prompts.rows_B, source)

    def _attention(self, segments: tuple[Segment, ...], slots_T: Tensor, positions_T: Tensor) -> PagedAttention:
        return PagedAttention(self.backend, self.cache, AttentionPlan(segments, positions_T), slots_T)

    def _set_first_level(self, state: BatchState) -> None:
        """The next tree's first level, from its hidden state."""
        logits_BV = self.head.logits(state.level1_hidden_BH)
        top_tokens(logits_BV, self.topk, self.head.d2t_V, out=(state.level1_logp_BK, state.level1_tokens_BK))
