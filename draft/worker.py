"""The multi-step draft worker: grows a tree from the last extend's first level, and keeps the draft's KV in step.

The draft's KV row i belongs to pair (token i + 1, feature i), so L committed tokens have L draft rows, the bonus token's
embedding in the last.  Slots are immutable within a round, one per (level, branch); each branch carries the table of its own
ancestors' slots, re-gathered by parent at every step, which is the topk-expanded page table itself: ancestry is exact.

Knows heads, trees and attention; neither requests nor the verifier.

Shapes: B sequences, K topk, S num_steps, E = S + 1 extend rows, T packed tokens, H hidden, F features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.attention.attend import PagedAttention
from specdec.attention.backend import Backend
from specdec.attention.kv_cache import MHACache
from specdec.attention.plan import causal_segment, fill_draft_suffix, prefix_segment, slots_at
from specdec.attention.segment import AttentionPlan, Segment
from specdec.batch import BatchState
from specdec.config import SpecConfig
from specdec.draft.build_tree import best_nodes
from specdec.draft.eagle import DraftHead
from specdec.draft.expand import first_level, next_level
from specdec.draft.topk import top_tokens
from specdec.models.packed import PackedPrompts
from specdec.tree import DraftTree


class DraftWorker:
    """Runs a head over the running batch.  Its cache has the target's slots: one page table serves both models."""

    def __init__(self, head: DraftHead, cache: MHACache, backend: Backend, spec: SpecConfig, page_size: int) -> None:
        self.head, self.cache, self.backend = head, cache, backend
        self.spec, self.page_size = spec, page_size

    def draft(self, state: BatchState) -> DraftTree:
        """The next tree of every row.  S levels take S - 1 steps: the first came with the last extend."""
        S, K = self.spec.num_steps, self.spec.topk
        B = state.rows
        candidates, beam = first_level(state.level1_tokens_BK, state.level1_logp_BK)
        hidden_BKH = state.level1_hidden_BH[:, None].expand(-1, K, -1)
        branches_K = torch.arange(K, device=state.lens_B.device)
        ancestors_BKS = torch.zeros(B, K, S, dtype=torch.int64, device=state.lens_B.device)
        for step in range(S - 1):
            slots_BK = slots_at(state.page_table_BW, state.lens_B[:, None] + step * K + branches_K, self.page_size)
            ancestors_BKS = ancestors_BKS.gather(1, beam.parents_BK[..., None].expand_as(ancestors_BKS))
            ancestors_BKS[..., step] = slots_BK
            hidden = self._step(state, step, beam.tokens_BK, hidden_BKH, slots_BK, ancestors_BKS)
            logp, ids = top_tokens(self.head.logits(hidden), K)
            tokens = self.head.target_ids(ids)
            candidates, beam = next_level(candidates, beam, tokens.view(B, K, K), logp.view(B, K, K))
            hidden_BKH = hidden.view(B, K, -1).gather(1, beam.parents_BK[..., None].expand(B, K, hidden.shape[-1]))
        if K == 1:
            return DraftTree.chain(torch.cat((state.bonus_B[:, None], candidates.tokens_BC), dim=1))
        return best_nodes(candidates, state.bonus_B, self.spec.num_draft_tokens, S)

    def extend(self, state: BatchState, base_lens_B: Tensor, tokens_BE: Tensor, last_B: Tensor, features_BEF: Tensor) -> None:
        """Runs the head over the accepted tokens with true target features; leaves the next tree's first level in `state`.

        base_lens_B: int32 committed length before this round.  tokens_BE: the emitted tokens; columns behind last_B are
        padding whose rows nobody reads.  last_B: int64 column of the bonus token.  features_BEF: of the token before each.
        """
        B, E = tokens_BE.shape
        positions_BE = base_lens_B[:, None] + torch.arange(E, device=tokens_BE.device)
        slots_T = slots_at(state.page_table_BW, positions_BE, self.page_size).flatten()
        segment = causal_segment(state.page_table_BW, base_lens_B + E, E, self.page_size)
        attn = PagedAttention(self.backend, self.cache, AttentionPlan((segment,)), slots_T)
        features_TH = self.head.fuse(features_BEF.flatten(0, 1))
        hidden = self.head(tokens_BE.flatten(), features_TH, positions_BE.flatten(), attn).view(B, E, -1)
        last_B1H = last_B[:, None, None].expand(B, 1, hidden.shape[-1])
        self._set_first_level(state, hidden.gather(1, last_B1H)[:, 0])

    def prefill(self, state: BatchState, prompts: PackedPrompts, features_TF: Tensor) -> None:
        """Extend over whole prompts.  `state` holds the prompts' rows, in their order, bonus tokens set."""
        attn = PagedAttention(self.backend, self.cache, prompts.plan, prompts.slots_T)
        next_ids_T = prompts.next_ids(state.bonus_B)
        hidden_TH = self.head(next_ids_T, self.head.fuse(features_TF), prompts.positions_T, attn)
        self._set_first_level(state, hidden_TH.index_select(0, prompts.last_B))

    def _step(
        self,
        state: BatchState,
        step: int,
        tokens_BK: Tensor,
        hidden_BKH: Tensor,
        slots_BK: Tensor,
        ancestors_BKS: Tensor,
    ) -> Tensor:
        """One forward over all branches at pair position L + step: hidden [B * K, H]."""
        B, K = tokens_BK.shape
        if K == 1:  # a chain's own slots follow the prefix: one causal row reads both
            lens_B = state.lens_B + (step + 1)
            plan = AttentionPlan((causal_segment(state.page_table_BW, lens_B, 1, self.page_size),))
        else:
            suffix = Segment.empty(B * K, step + 1, 1, device=tokens_BK.device)
            fill_draft_suffix(suffix, ancestors_BKS, step)
            plan = AttentionPlan((prefix_segment(state.page_table_BW, state.lens_B, K, self.page_size), suffix))
        attn = PagedAttention(self.backend, self.cache, plan, slots_BK.flatten())
        positions_BK = (state.lens_B[:, None] + step).expand(B, K)
        return self.head(tokens_BK.flatten(), hidden_BKH.flatten(0, 1), positions_BK.flatten().long(), attn)

    def _set_first_level(self, state: BatchState, hidden_BH: Tensor) -> None:
        logp_BK, ids_BK = top_tokens(self.head.logits(hidden_BH), self.spec.topk)
        state.level1_tokens_BK.copy_(self.head.target_ids(ids_BK))
        state.level1_logp_BK.copy_(logp_BK)
        state.level1_hidden_BH.copy_(hidden_BH)
