"""The operators of ordinary heads: rotate and store, attention over pages, and suffix with merge.

An operator's arguments are tensors and numbers, so this module takes views, segments and scorings apart for a trace, and puts
them together again where an operator computes.  On a GPU that is the `triton` backend's work, on a CPU the `torch` backend's.

Shapes: T tokens or queries, Q (also H) query heads, K kv heads, X = Q + 2K, D head dim, N slots, P positions, R rows, W table
width.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from specdec.attention.attend import make_backend
from specdec.attention.backend import Backend
from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.quant_cache import QuantView
from specdec.attention.kinds import Scoring
from specdec.attention.pages import PageTable
from specdec.attention.segment import Segment
from specdec.attention.state import AttentionState, merge_states
from specdec.ops.launch import KERNEL_DTYPES, has_triton
from specdec.ops.operator import define
from specdec.ops.rope import HeadPrep, Rotation

HeadsView = MHAView | QuantView


@cache
def _backend(name: str) -> Backend:
    return make_backend(name)


def backend_for(x: Tensor) -> Backend:
    """The attention backend that computes an operator of x."""
    return _backend("triton" if x.is_cuda and x.dtype in KERNEL_DTYPES and has_triton() else "torch")


def view_of(kv_N2KD: Tensor, scales: Tensor | None) -> HeadsView:
    """One layer of a cache, from its tensors.  scales: [2, K] of fp8 or [N, 2, K] of int8; None: the cache has no scales."""
    if scales is None:
        return MHAView(kv_N2KD)
    return QuantView(kv_N2KD, scale_2K=scales) if scales.dim() == 2 else QuantView(kv_N2KD, scales_N2K=scales)


def rope_store(
    qkv_TXD: Tensor,
    kv_N2KD: Tensor,
    slots_T: Tensor,
    positions_T: Tensor | None = None,
    table_P2D: Tensor | None = None,
    norm_HD: Tensor | None = None,
    eps: float = 0.0,
    scale_2K: Tensor | None = None,
    scales_N2K: Tensor | None = None,
) -> None:
    """Norms and rotates the queries of qkv in place, and stores the keys and values, normed and rotated, in the slots (int64).

    Afterwards the keys and values in qkv are arbitrary.
    positions_T, table_P2D: the rotation; None: there is none.  norm_HD, eps: the norm of query and key heads; None: none.
    scale_2K: the scales of an fp8 cache, which are read.  scales_N2K: those of an int8 cache, which are written.
    """
    rotation = None if table_P2D is None or positions_T is None else Rotation(table_P2D, positions_T)
    prep = HeadPrep(rotation, kv_N2KD.shape[2], norm_HD, eps)
    view = view_of(kv_N2KD, scale_2K if scales_N2K is None else scales_N2K)
    backend_for(qkv_TXD).store(view, qkv_TXD, slots_T, prep)


def paged_attention(
    q_THD: Tensor,
    kv_N2KD: Tensor,
    table_RW: Tensor,
    lens_R: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    page_size: int,
    causal: bool,
    scale: float,
    softcap: float | None = None,
    starts_T: Tensor | None = None,
    span: int | None = None,
    scales: Tensor | None = None,
    ragged: bool = False,
) -> tuple[Tensor, Tensor]:
    """The state of every query over the keys of its row: out [T, H, D], and lse [T, H] in float32, natural log.

    The arguments after the cache are the fields of a Segment; scales: as in `view_of`.
    """
    segment = Segment(
        PageTable(table_RW, page_size), lens_R, cu_seqlens_q, max_seqlen_q, causal, ragged, starts_T=starts_T, span=span
    )
    state = backend_for(q_THD).run(q_THD, view_of(kv_N2KD, scales), segment, Scoring(scale, softcap))
    return state.out_THD, state.lse_TH.float()


def suffix_merge(
    q_THD: Tensor,
    kv_N2KD: Tensor,
    slots_TW: Tensor,
    lens_T: Tensor,
    out_THD: Tensor,
    lse_TH: Tensor,
    scale: float,
    softcap: float | None = None,
    starts_T: Tensor | None = None,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The state of every query over its suffix, merged with the state (out, lse) of its other keys.

    The suffix of query t are the first lens_T[t] slots of row t, both int32.  starts_T, scales: as in `paged_attention`.
    """
    suffix, view, scoring = Segment.of_slots(slots_TW, lens_T), view_of(kv_N2KD, scales), Scoring(scale, softcap)
    suffix, before = replace(suffix, starts_T=starts_T), AttentionState(out_THD, lse_TH)
    if backend_for(q_THD).name == "triton":
        state = merged_by_kernel(q_THD, view, suffix, scoring, before)
    else:
        state = merge_states(before, backend_for(q_THD).run(q_THD, view, suffix, scoring))
    return state.out_THD, state.lse_TH.float()


def merged_by_kernel(
    q_THD: Tensor, view: HeadsView, suffix: Segment, scoring: Scoring, before: AttentionState
) -> AttentionState:
    """`suffix_merge` by the kernel that the `triton` backend runs after its paged kernels, here without their splits."""
    from specdec.attention.kernels.triton_backend import launch_suffix_merge

    (T, H, D), device = q_THD.shape, q_THD.device
    state = AttentionState.empty((T, H, D), q_THD.dtype, device)
    if T:
        no_splits = AttentionState.empty((T, H, 0, D), torch.float32, device)
        launch_suffix_merge(q_THD, view, suffix, scoring, no_splits, before, state, left_filled=True)
    return state


def state_fake(q_THD: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """The state of queries, with values as wide as they are."""
    return q_THD.new_empty(q_THD.shape), q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)


def nothing_fake(*_: object) -> None:
    """The result of an operator that only changes its arguments."""


ROPE_STORE = define(
    "rope_store(Tensor(a!) qkv, Tensor(b!) kv, Tensor slots, Tensor? positions=None, Tensor? table=None, Tensor? norm=None, "
    "float eps=0.0, Tensor? scale=None, Tensor(c!)? scales=None) -> ()",
    rope_store,
    nothing_fake,
)
PAGED_ATTENTION = define(
    "paged_attention(Tensor q, Tensor kv, Tensor table, Tensor lens, Tensor cu_seqlens_q, SymInt max_seqlen_q, "
    "SymInt page_size, bool causal, float scale, float? softcap=None, Tensor? starts=None, SymInt? span=None, "
    "Tensor? scales=None, bool ragged=False) -> (Tensor, Tensor)",
    paged_attention,
    state_fake,
)
SUFFIX_MERGE = define(
    "suffix_merge(Tensor q, Tensor kv, Tensor slots, Tensor lens, Tensor out, Tensor lse, float scale, float? softcap=None, "
    "Tensor? starts=None, Tensor? scales=None) -> (Tensor, Tensor)",
    suffix_merge,
    state_fake,
)
