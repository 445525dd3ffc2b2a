"""The attention backend `operators`, for passes that torch.export or torch.compile traces: every call is one operator.

It computes the same as the `triton` backend on a GPU and the `torch` backend on a CPU.  Called eagerly it works as well, but
an operator's dispatch takes longer than a direct call.

Shapes: T queries or tokens, X = Q + 2K heads of a token, Q (also H) query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from specdec.attention.backend import Backend
from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.mla_cache import MLAView
from specdec.attention.caches.planes import KVView
from specdec.attention.caches.quant_cache import QuantView
from specdec.attention.kinds import PLAIN, Scoring
from specdec.attention.operators.heads import PAGED_ATTENTION, ROPE_STORE, SUFFIX_MERGE
from specdec.attention.operators.latent import LATENT_ATTENTION
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.state import AttentionState, merge_states
from specdec.ops.rope import HeadPrep


class OperatorBackend(Backend):
    """Calls operators in place of kernels.

    An fp8 cache must have its scales before: to set them, the host reads the first keys and values.
    """

    name = "operators"
    reads_no_lengths = True

    def store(self, view: KVView, qkv_TXD: Tensor, slots_T: Tensor, prep: HeadPrep) -> Tensor:
        assert isinstance(view, MHAView | QuantView)
        scale_2K = scales_N2K = None
        if isinstance(view, QuantView):
            assert not view.needs_scale, "an fp8 cache needs its scales before a pass is traced"
            scale_2K, scales_N2K = view.scale_2K, view.scales_N2K
        rotation = prep.rotation
        turn = (None, None) if rotation is None else (rotation.positions_T, rotation.table_P2D)
        ROPE_STORE(qkv_TXD, view.kv, slots_T, *turn, prep.norm_HD, prep.eps, scale_2K, scales_N2K)
        return qkv_TXD[:, : qkv_TXD.shape[1] - 2 * prep.num_kv_heads]

    def run(self, q_THD: Tensor, view: KVView, segment: Segment, scoring: Scoring = PLAIN) -> AttentionState:
        pages, lens_R = segment.pages, segment.cache_seqlens
        rows = (pages.table, lens_R, segment.cu_seqlens_q, segment.max_seqlen_q, pages.page_size, segment.causal)
        scale, local = scoring.factor(q_THD.shape[-1]), (segment.starts_T, segment.span)
        if isinstance(view, MLAView):
            assert scoring.scale is not None and scoring.softcap is None
            return AttentionState(*LATENT_ATTENTION(q_THD, view.latent, *rows, view.rank, scale, *local, segment.ragged))
        assert isinstance(view, MHAView | QuantView)
        numbers = (scale, scoring.softcap)
        return AttentionState(*PAGED_ATTENTION(q_THD, view.kv, *rows, *numbers, *local, scales_of(view), segment.ragged))

    def attend(self, q_THD: Tensor, view: KVView, prepared: Any, scoring: Scoring = PLAIN) -> AttentionState:
        plan: AttentionPlan = prepared
        state, *rest = [self.run(q_THD, view, segment, scoring) for segment in plan.segments]
        for other in rest:
            state = merge_states(state, other)
        if plan.suffix is not None:
            state = self._with_suffix(q_THD, view, plan.suffix, scoring, state)
        return state

    def _with_suffix(
        self, q_THD: Tensor, view: KVView, suffix: Segment, scoring: Scoring, state: AttentionState
    ) -> AttentionState:
        if isinstance(view, MLAView):
            return merge_states(state, self.run(q_THD, view, suffix, scoring))
        assert isinstance(view, MHAView | QuantView)
        own, numbers = (suffix.pages.table, suffix.cache_seqlens), (scoring.factor(q_THD.shape[-1]), scoring.softcap)
        return AttentionState(*SUFFIX_MERGE(q_THD, view.kv, *own, *state, *numbers, suffix.starts_T, scales_of(view)))


def scales_of(view: MHAView | QuantView) -> Tensor | None:
    """The scales of an 8-bit view; None for others."""
    if isinstance(view, MHAView):
        return None
    return view.scale_2K if view.scales_N2K is None else view.scales_N2K
