"""The target verifier: prompts in, first tokens out; then trees in, accepted tokens out, their KV committed.

Knows the target, trees and attention; neither requests nor the draft.

Shapes: B sequences, N nodes, E = max_depth + 1 places on a path, T packed tokens, V vocabulary, F features.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from specdec.attention.attend import PagedAttention
from specdec.attention.backend import Backend
from specdec.attention.kv_cache import MHACache
from specdec.attention.plan import causal_segment, fill_tree_suffix, prefix_segment, slots_at
from specdec.attention.segment import AttentionPlan, Segment
from specdec.batch import BatchState
from specdec.models.causal_lm import CausalLM, TargetOutput
from specdec.models.packed import PackedPrompts
from specdec.sampling import RowSampling, sample_rows
from specdec.tree import DraftTree
from specdec.verify.accept import accept_path

# How the rows of a batch choose tokens: all greedy; some sampled; some sampled with top-k or top-p (which need a sort).
SamplingMode = Literal["greedy", "sampled", "filtered"]


class VerifyResult(NamedTuple):
    """tokens_BE: emitted tokens (a accepted, the bonus, padding).  accepted_B: a.  base_lens_B: L before the round.

    features_BEF: the target's features along the path, for the draft's extend; None if nobody asked.
    """

    tokens_BE: Tensor
    accepted_B: Tensor
    base_lens_B: Tensor
    features_BEF: Tensor | None


class TargetVerifier:
    """Runs the target over prompts and trees.  aux_layers: captured for the draft; empty: it wants the final hidden state."""

    def __init__(
        self, model: CausalLM, cache: MHACache, backend: Backend, page_size: int, aux_layers: tuple[int, ...] = ()
    ) -> None:
        self.model, self.cache, self.backend = model, cache, backend
        self.page_size, self.aux_layers = page_size, aux_layers

    def prefill(
        self, prompts: PackedPrompts, sampling: RowSampling, mode: SamplingMode, with_features: bool = True
    ) -> tuple[Tensor, Tensor]:
        """(first tokens [B], features [T, F]).  sampling: of each prompt.  Without features, what comes is not for a draft."""
        attn = PagedAttention(self.backend, self.cache, prompts.plan, prompts.slots_T)
        out = self.model(prompts.ids_T, prompts.positions_T, attn, self.aux_layers if with_features else ())
        logits_BV = self.model.logits(out.hidden_TH.index_select(0, prompts.last_B))
        next_positions_B = prompts.positions_T.index_select(0, prompts.last_B) + 1
        return choose_tokens(logits_BV, sampling, next_positions_B, mode), self._features(out)

    def verify(self, state: BatchState, tree: DraftTree, mode: SamplingMode, with_features: bool = True) -> VerifyResult:
        """One target pass over every tree; accepts, commits KV, and moves lengths and bonus tokens in `state` on.

        A tree of the root alone is plain decoding, which needs no features.
        """
        B, N = tree.tokens_BN.shape
        base_lens_B = state.lens_B.clone()
        nodes_N = torch.arange(N, device=base_lens_B.device)
        slots_BN = slots_at(state.page_table_BW, base_lens_B[:, None] + nodes_N, self.page_size)
        positions_T = (base_lens_B[:, None] + tree.depths_BN).flatten()
        attn = PagedAttention(self.backend, self.cache, self._plan(state, tree, slots_BN), slots_BN.flatten())
        aux_layers = self.aux_layers if with_features else ()
        out = self.model(tree.tokens_BN.flatten(), positions_T, attn, aux_layers)
        logits_TV = self.model.logits(out.hidden_TH)
        tokens_BN = choose_tokens(logits_TV, state.sampling.expand_rows(N), positions_T + 1, mode).view(B, N)
        accepted = accept_path(tree, tokens_BN)
        if not tree.is_chain:
            self._commit(slots_BN, accepted.path_BE)
        state.lens_B.add_((accepted.accepted_B + 1) * state.active_B)
        state.bonus_B.copy_(accepted.tokens_BE.gather(1, accepted.accepted_B[:, None])[:, 0])
        features_BEF = self._path_features(out, accepted.path_BE) if with_features else None
        return VerifyResult(accepted.tokens_BE, accepted.accepted_B, base_lens_B, features_BEF)

    def _plan(self, state: BatchState, tree: DraftTree, slots_BN: Tensor) -> AttentionPlan:
        B, N = slots_BN.shape
        if tree.is_chain:
            return AttentionPlan((causal_segment(state.page_table_BW, state.lens_B + N, N, self.page_size),))
        suffix = Segment.empty(B * N, min(N, tree.max_depth + 1), 1, device=slots_BN.device)
        fill_tree_suffix(suffix, slots_BN, tree.mask_BNN)
        return AttentionPlan((prefix_segment(state.page_table_BW, state.lens_B, N, self.page_size), suffix))

    def _commit(self, slots_BN: Tensor, path_BE: Tensor) -> None:
        """Moves the accepted path's KV to the slots right behind the prefix, in all layers at once."""
        E = path_BE.shape[1]
        self.cache.move(slots_BN.gather(1, path_BE).flatten(), slots_BN[:, :E].flatten())

    def _features(self, out: TargetOutput) -> Tensor:
        return out.hidden_TH if out.aux_TA is None else out.aux_TA

    def _path_features(self, out: TargetOutput, path_BE: Tensor) -> Tensor:
        B = path_BE.shape[0]
        features_BNF = self._features(out).view(B, out.hidden_TH.shape[0] // B, -1)
        return features_BNF.gather(1, path_BE[..., None].expand(-1, -1, features_BNF.shape[-1]))


def choose_tokens(logits_RV: Tensor, sampling: RowSampling, position_R: Tensor, mode: SamplingMode) -> Tensor:
    """[R] int64: the target's token of each row, at the absolute position given."""
    if mode == "greedy":
        return logits_RV.argmax(-1)
    return sample_rows(logits_RV, sampling, position_R, filtered=mode == "filtered")
