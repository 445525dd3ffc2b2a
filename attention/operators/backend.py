"""The attention backend `operators`, for passes that torch.export or torch.compile traces: every call is one operator.

It computes the same as the `triton` backend on a GPU and the `torch` backend on a CPU.  Called eagerly it works as well, but
an operator's dispatch takes longer than a direct call.

Shapes: T queries or tokens, X = Q + 2K heads of a token, Q (also H) query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import Tensor

from specdec.attention.backend import Backend
from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.latent_view import LatentView
from specdec.attention.caches.layout import HeadsView, KVView
from specdec.attention.caches.quant_cache import QuantView
from specdec.attention.caches.split_cache import PairedView, QuantSplitView, SplitView
from specdec.attention.kinds import PLAIN, Scoring
from specdec.attention.operators.heads import PAGED_ATTENTION, ROPE, ROPE_STORE, ROWS_STORE, SUFFIX_MERGE
from specdec.attention.operators.latent import LATENT_ATTENTION, latents_of
from specdec.attention.segment import AttentionPlan, Segment
from specdec.attention.state import AttentionState, merge_all, merge_states
from specdec.ops.rope import HeadPrep

# Fields of Scoring and of Segment that the operators take; every other must have its default.
_SCORING = {"scale", "softcap", "sinks_H", "slopes_H", "sqrt_alibi"}
_SEGMENT = {
    "pages", "cache_seqlens", "cu_seqlens_q", "max_seqlen_q", "causal", "ragged", "base_B", "starts_T",
    "alibi_positions_T", "span", "max_cached",
    "window", "whole_or_none",  # what starts_T says too
}  # fmt: skip
_OTHER_SCORING = tuple((field.name, field.default) for field in fields(Scoring) if field.name not in _SCORING)
_OTHER_SEGMENT = tuple((field.name, field.default) for field in fields(Segment) if field.name not in _SEGMENT)


class OperatorBackend(Backend):
    """Calls operators in place of kernels.

    An fp8 cache must have its scales before: to set them, the host reads the first keys and values.
    """

    name = "operators"
    reads_no_lengths = True

    def store(self, view: HeadsView, qkv_TXD: Tensor, slots_T: Tensor, prep: HeadPrep) -> Tensor:
        if not isinstance(view, MHAView | QuantView):
            raise _unknown(view)
        scale_2K = scales_N2K = None
        if isinstance(view, QuantView):
            assert not view.needs_scale, "an fp8 cache needs its scales before a pass is traced"
            scale_2K, scales_N2K = view.scale_2K, view.scales_N2K
        ROPE_STORE(qkv_TXD, view.kv, slots_T, *_rope_arguments(prep), scale_2K, scales_N2K, *prep.values)
        return qkv_TXD[:, : prep.query_heads(qkv_TXD.shape[1])]

    def store_rows(self, view: SplitView | QuantSplitView, rows_TC: Tensor, slots_T: Tensor, prep: HeadPrep) -> Tensor:
        if not isinstance(view, SplitView) or view.rows is None:
            raise _unknown(view)
        assert not prep.values.are_keys
        (_, K, D), (_, _, E) = (x.shape for x in view.heads)
        ROWS_STORE(rows_TC, view.rows, slots_T, K, D, *_rope_arguments(prep), *prep.values[:2])
        return rows_TC[:, : rows_TC.shape[1] - K * (D + E)].unflatten(1, (-1, D))

    def rotate(self, q_TQD: Tensor, prep: HeadPrep) -> Tensor:
        ROPE(q_TQD, *_rope_arguments(prep))
        return q_TQD

    def run(self, q_THD: Tensor, view: KVView, segment: Segment, scoring: Scoring = PLAIN) -> AttentionState:
        _check(segment, scoring)
        pages, lens_R = segment.pages, segment.cache_seqlens
        rows = (pages.table, lens_R, segment.cu_seqlens_q, segment.max_seqlen_q, pages.page_size, segment.causal)
        scale, local = scoring.factor(q_THD.shape[-1]), (segment.starts_T, segment.span)
        last = (scoring.slopes_H, segment.alibi_positions_T, scoring.sqrt_alibi, *_row_heads(view))
        if isinstance(view, LatentView):
            assert scoring.scale is not None and scoring.softcap is None and scoring.slopes_H is None
            return AttentionState(*LATENT_ATTENTION(q_THD, latents_of(view), view.rank, *rows, scale, *local, segment.ragged))
        return AttentionState(
            *PAGED_ATTENTION(q_THD, *_tensors(view), *rows, scale, scoring.softcap, *local, segment.ragged, *last)
        )

    def attend(self, q_THD: Tensor, view: KVView, prepared: Any, scoring: Scoring = PLAIN) -> AttentionState:
        plan: AttentionPlan = prepared
        state = merge_all([self.run(q_THD, view, segment, scoring) for segment in plan.segments])
        return state if plan.suffix is None else self._with_suffix(q_THD, view, plan.suffix, scoring, state)

    def _with_suffix(
        self, q_THD: Tensor, view: KVView, suffix: Segment, scoring: Scoring, state: AttentionState
    ) -> AttentionState:
        if isinstance(view, LatentView):
            return merge_states(state, self.run(q_THD, view, suffix, scoring))
        _check(suffix, scoring)
        own, numbers = (suffix.pages.table, suffix.cache_seqlens), (scoring.factor(q_THD.shape[-1]), scoring.softcap)
        last = (scoring.slopes_H, suffix.alibi_positions_T, scoring.sqrt_alibi, *_row_heads(view))
        return AttentionState(*SUFFIX_MERGE(q_THD, *_tensors(view), *own, *state, *numbers, suffix.starts_T, *last))


def _rope_arguments(prep: HeadPrep) -> tuple[Tensor | None, Tensor | None, Tensor | None, float]:
    """Positions, rotary table, norm weights and the norm's eps."""
    rotation = prep.rotation
    rope = (None, None) if rotation is None else (rotation.positions_T, rotation.table_P2D)
    return *rope, prep.norm_HD, prep.eps


def _tensors(view: KVView) -> tuple[Tensor, Tensor | None, bool]:
    """The keys and values of a view, its scales, and whether it reads heads in pairs."""
    if isinstance(view, SplitView) and view.rows is not None:
        return view.rows, None, False
    if not isinstance(view, MHAView | QuantView | PairedView):
        raise _unknown(view)
    if view.int8_queries:
        raise TypeError("the operators of attention know no int8_queries: it must be False, got True")
    return view.kv, view.scales if view.quant else None, isinstance(view, PairedView)


def _row_heads(view: KVView) -> tuple[int, ...]:
    """Kv heads, where a cache keeps keys and values of unlike widths in one row."""
    return (view.k.shape[1],) if isinstance(view, SplitView) else ()


def _unknown(view: KVView) -> TypeError:
    known = "MHAView, QuantView, PairedView, SplitView of rows or LatentView"
    return TypeError(f"the operators of attention read a cache by {known}, got {type(view).__name__}")


def _check(segment: Segment, scoring: Scoring) -> None:
    """Refuses what the operators would leave out in silence."""
    for what, others in ((scoring, _OTHER_SCORING), (segment, _OTHER_SEGMENT)):
        for name, default in others:
            if getattr(what, name) is not default:
                raise TypeError(f"the operators of attention know no {name}: it must be {default}, got {getattr(what, name)}")
