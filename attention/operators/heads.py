"""The operators of ordinary heads: rotate and store, attention over pages, and suffix with merge.

An operator's arguments are tensors and scalars, so this module takes views, segments and scorings apart for a trace, and puts
them together again where an operator computes.  On a GPU that is the `triton` backend's work, on a CPU the `torch` backend's.

Shapes: T tokens or queries, Q (also H) query heads, K kv heads, X = Q + 2K, D head dim, E value dim, N slots, P positions, R
rows, W table width; C what a token keeps where keys and values lie in one row, K (D + E).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specdec.attention.attend import make_backend
from specdec.attention.backend import Backend
from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.quant_cache import QuantView
from specdec.attention.caches.split_cache import PairedView, SplitView
from specdec.attention.kinds import Scoring
from specdec.attention.pages import PageTable
from specdec.attention.segment import Segment
from specdec.attention.state import AttentionState, merge_states
from specdec.ops.launch import KERNEL_DTYPES, has_triton
from specdec.ops.operator import define, nothing_fake
from specdec.ops.rope import PLAIN_VALUES, HeadPrep, Rotation, ValuePrep

ReadView = MHAView | QuantView | PairedView | SplitView


@cache
def _backend(name: str) -> Backend:
    return make_backend(name)


def backend_for(x: Tensor) -> Backend:
    """The attention backend that computes an operator of x."""
    return _backend("triton" if x.is_cuda and x.dtype in KERNEL_DTYPES and has_triton() else "torch")


def stored_view(kv_N2KD: Tensor, scales: Tensor | None) -> MHAView | QuantView:
    """One layer of a cache, from its tensors.  scales: [2, K] of fp8 or [N, 2, K] of int8; None: the cache has no scales."""
    if scales is None:
        return MHAView(kv_N2KD)
    return QuantView(kv_N2KD, scale_2K=scales) if scales.dim() == 2 else QuantView(kv_N2KD, scales_N2K=scales)


def read_view(kv: Tensor, scales: Tensor | None, paired: bool, row_heads: int, head_dim: int) -> ReadView:
    """`stored_view` as attention reads it.  paired: two heads as one of twice the width (differential attention).

    row_heads: K, of a cache [N, C] whose values have another width than keys (SplitView); 0: of all others.
    """
    if row_heads:
        return SplitView.of(kv, row_heads, head_dim)
    view = stored_view(kv, scales)
    return PairedView.of(view) if paired else view


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
    normed_values: bool = False,
    value_scale: float = 1.0,
    values_are_keys: bool = False,
) -> None:
    """Norms and rotates the queries of qkv in place, and stores the keys and values, normed and rotated, in the slots (int64).

    Afterwards the keys and values in qkv are arbitrary.
    positions_T, table_P2D: the rotation; None: there is none.  norm_HD, eps: the norm of query and key heads; None: none.
    scale_2K: the scales of an fp8 cache, which are read.  scales_N2K: those of an int8 cache, which are written.
    normed_values, value_scale, values_are_keys: see ValuePrep.
    """
    values = ValuePrep(normed_values, value_scale, values_are_keys)
    prep = _prep(positions_T, table_P2D, kv_N2KD.shape[2], norm_HD, eps, values)
    view = stored_view(kv_N2KD, scale_2K if scales_N2K is None else scales_N2K)
    backend_for(qkv_TXD).store(view, qkv_TXD, slots_T, prep)


def rows_store(
    rows_TC: Tensor,
    kv_NC: Tensor,
    slots_T: Tensor,
    row_heads: int,
    head_dim: int,
    positions_T: Tensor | None = None,
    table_P2D: Tensor | None = None,
    norm_HD: Tensor | None = None,
    eps: float = 0.0,
    normed_values: bool = False,
    value_scale: float = 1.0,
) -> None:
    """`rope_store` for rows [T, (Q + K) D + K E] of heads whose values have another width than keys: see `read_view`.

    Afterwards what is not queries in them is arbitrary.
    """
    prep = _prep(positions_T, table_P2D, row_heads, norm_HD, eps, ValuePrep(normed_values, value_scale))
    backend_for(rows_TC).store_rows(SplitView.of(kv_NC, row_heads, head_dim), rows_TC, slots_T, prep)


def rope(
    q_TQD: Tensor,
    positions_T: Tensor | None = None,
    table_P2D: Tensor | None = None,
    norm_HD: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Norms and rotates, in place, the queries of a layer that stores no keys.  The arguments are those of `rope_store`."""
    backend_for(q_TQD).rotate(q_TQD, _prep(positions_T, table_P2D, 0, norm_HD, eps))


def _prep(
    positions_T: Tensor | None, table_P2D: Tensor | None, num_kv_heads: int, norm_HD: Tensor | None, eps: float,
    values: ValuePrep = PLAIN_VALUES,
) -> HeadPrep:  # fmt: skip
    rotation = None if table_P2D is None or positions_T is None else Rotation(table_P2D, positions_T)
    return HeadPrep(rotation, num_kv_heads, norm_HD, eps, values)


def paged_attention(
    q_THD: Tensor,
    kv: Tensor,
    scales: Tensor | None,
    paired: bool,
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
    ragged: bool = False,
    slopes_H: Tensor | None = None,
    alibi_positions_T: Tensor | None = None,
    sqrt_alibi: bool = False,
    row_heads: int = 0,
) -> tuple[Tensor, Tensor]:
    """The state of every query over the keys of its row: out [T, H, E], and lse [T, H] in float32, natural log.

    kv, scales, paired and row_heads are the arguments of `read_view`, the others the fields of a Segment and of a Scoring.
    """
    rows = (PageTable(table_RW, page_size), lens_R, cu_seqlens_q, max_seqlen_q, causal, ragged)
    segment = Segment(*rows, starts_T=starts_T, alibi_positions_T=alibi_positions_T, span=span)
    scoring = Scoring(scale, softcap, slopes_H=slopes_H, sqrt_alibi=sqrt_alibi)
    state = backend_for(q_THD).run(q_THD, read_view(kv, scales, paired, row_heads, q_THD.shape[2]), segment, scoring)
    return state.out_THD, state.lse_TH.float()


def suffix_merge(
    q_THD: Tensor,
    kv: Tensor,
    scales: Tensor | None,
    paired: bool,
    slots_TW: Tensor,
    lens_T: Tensor,
    out_THE: Tensor,
    lse_TH: Tensor,
    scale: float,
    softcap: float | None = None,
    starts_T: Tensor | None = None,
    slopes_H: Tensor | None = None,
    alibi_positions_T: Tensor | None = None,
    sqrt_alibi: bool = False,
    row_heads: int = 0,
) -> tuple[Tensor, Tensor]:
    """The state of every query over its suffix, merged with the state (out, lse) of its other keys.

    The suffix of query t are the first lens_T[t] slots of row t, both int32.  The rest is as in `paged_attention`.
    """
    view, before = read_view(kv, scales, paired, row_heads, q_THD.shape[2]), AttentionState(out_THE, lse_TH)
    scoring = Scoring(scale, softcap, slopes_H=slopes_H, sqrt_alibi=sqrt_alibi)
    suffix = replace(Segment.of_slots(slots_TW, lens_T), starts_T=starts_T, alibi_positions_T=alibi_positions_T)
    if backend_for(q_THD).name == "triton":
        state = merged_by_kernel(q_THD, view, suffix, scoring, before)
    else:
        state = merge_states(before, backend_for(q_THD).run(q_THD, view, suffix, scoring))
    return state.out_THD, state.lse_TH.float()


def merged_by_kernel(
    q_THD: Tensor, view: ReadView, suffix: Segment, scoring: Scoring, before: AttentionState
) -> AttentionState:
    """`suffix_merge` by the kernel that the `triton` backend runs after its paged kernels, here without their splits."""
    from specdec.attention.kernels.triton_backend import launch_suffix_merge

    (T, H, E), device = before.out_THD.shape, q_THD.device
    state = AttentionState.empty((T, H, E), q_THD.dtype, device)
    if T:
        no_splits = AttentionState.empty((T, H, 0, E), torch.float32, device)
        launch_suffix_merge(q_THD, view, suffix, scoring, no_splits, before, state, left_filled=True)
    return state


def state_fake(q_THD: Tensor, kv: Tensor, scales: Tensor | None, paired: bool, *others: Any) -> tuple[Tensor, Tensor]:
    """An empty state of the queries.  others: of a cache of rows, row_heads is the last."""
    T, H, D = q_THD.shape
    width = kv.shape[1] // others[-1] - D if kv.dim() == 2 else 2 * D if paired else D
    return q_THD.new_empty(T, H, width), q_THD.new_empty(T, H, dtype=torch.float32)


ROPE_STORE = define(
    "rope_store(Tensor(a!) qkv, Tensor(b!) kv, Tensor slots, Tensor? positions=None, Tensor? table=None, Tensor? norm=None, "
    "float eps=0.0, Tensor? scale=None, Tensor(c!)? scales=None, bool normed_values=False, float value_scale=1.0, "
    "bool values_are_keys=False) -> ()",
    rope_store,
    nothing_fake,
)
ROWS_STORE = define(
    "rows_store(Tensor(a!) rows, Tensor(b!) kv, Tensor slots, int row_heads, int head_dim, Tensor? positions=None, "
    "Tensor? table=None, Tensor? norm=None, float eps=0.0, bool normed_values=False, float value_scale=1.0) -> ()",
    rows_store,
    nothing_fake,
)
ROPE = define(
    "rope(Tensor(a!) q, Tensor? positions=None, Tensor? table=None, Tensor? norm=None, float eps=0.0) -> ()",
    rope,
    nothing_fake,
)
PAGED_ATTENTION = define(
    "paged_attention(Tensor q, Tensor kv, Tensor? scales, bool paired, Tensor table, Tensor lens, Tensor cu_seqlens_q, "
    "SymInt max_seqlen_q, SymInt page_size, bool causal, float scale, float? softcap=None, Tensor? starts=None, "
    "SymInt? span=None, bool ragged=False, Tensor? slopes=None, Tensor? alibi_positions=None, bool sqrt_alibi=False, "
    "int row_heads=0) -> (Tensor, Tensor)",
    paged_attention,
    state_fake,
)
SUFFIX_MERGE = define(
    "suffix_merge(Tensor q, Tensor kv, Tensor? scales, bool paired, Tensor slots, Tensor lens, Tensor out, Tensor lse, "
    "float scale, float? softcap=None, Tensor? starts=None, Tensor? slopes=None, Tensor? alibi_positions=None, "
    "bool sqrt_alibi=False, int row_heads=0) -> (Tensor, Tensor)",
    suffix_merge,
    state_fake,
)
