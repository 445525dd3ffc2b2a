"""Three thin adapters of the flash-attn packages: each takes a segment and returns its state.

They translate argument names, layouts of lse and conventions for empty rows; they hold no kernel.  They answer segments that
the libraries' arguments can express, over keys in the models' own dtype (fa3: also over fp8), in pages that the library can
read.  Sinks are never passed to a library: they are added once, above the backend.

Shapes: T queries, H heads, K kv heads, D head dim, R rows, n queries of each row, P page size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.quant_cache import QuantView
from specdec.attention.flash.queries import float8_queries
from specdec.attention.kinds import Scoring
from specdec.attention.segment import Segment
from specdec.attention.state import AttentionState
from specdec.ops.index import kept

MIN_TILE = 64  # keys of flash-attn 3's smallest tile: smaller pages are loaded token by token, not by TMA

FlashView = MHAView | QuantView
Shared = dict[Any, Any]  # what the layers of a pass have in common, by a name that tells segments and heads apart
Adapter = Callable[[Tensor, FlashView, Segment, Scoring, Shared], AttentionState]


def can_express(segment: Segment) -> bool:
    """Whether the libraries' arguments say what the segment's queries read.

    A window is flash-attn 3's window_size: the last keys up to a query's own, where a row's queries are its last tokens.  So it
    does not fit a tree's prefix, whose queries stand after the row's end, each as far as its depth.  Chunks fit nothing that
    the libraries have in common.
    """
    if segment.alibi_positions_T is not None or segment.window_right:
        return False
    return segment.starts_T is None or segment.window is not None or segment.whole_or_none


def fa2_state(q_THD: Tensor, view: FlashView, segment: Segment, scoring: Scoring, shared: Shared) -> AttentionState:
    """The package flash_attn 2.8.  Pages hold a multiple of 256 tokens; a query that reads no key comes back with lse +inf.

    If all rows hold equally many queries, the call is flash_attn_with_kvcache, which may split keys over the GPU.  Ragged
    batches of prompts go through flash_attn_varlen_func, which can't.
    """
    from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

    k, v = _pages(q_THD, view, segment, scoring)
    rows, n = segment.rows, segment.max_seqlen_q
    options = dict(
        softmax_scale=scoring.scale, causal=segment.causal, softcap=scoring.softcap or 0.0, block_table=segment.pages.table
    )
    if not segment.ragged:
        out_RnHD, lse_RHn = flash_attn_with_kvcache(
            q_THD.unflatten(0, (rows, n)), k, v, cache_seqlens=segment.cache_seqlens, return_softmax_lse=True, **options
        )
        return _state(out_RnHD.flatten(0, 1), _without_inf(lse_RHn.transpose(1, 2).flatten(0, 1)), segment, shared)
    name = ("cu_seqlens_k", id(segment))
    if name not in shared:
        shared[name] = torch.nn.functional.pad(segment.cache_seqlens.cumsum(0, dtype=torch.int32), (1, 0))
    out_THD, lse_HT, _ = flash_attn_varlen_func(
        q_THD, k, v, segment.cu_seqlens_q, shared[name], max(n, 2), segment.pages.capacity, return_attn_probs=True, **options
    )  # max(n, 2): with 1 the library assumes that every row holds exactly one query, and an empty row holds none
    return _state(out_THD, _without_inf(lse_HT.t()), segment, shared)


def fa3_state(q_THD: Tensor, view: FlashView, segment: Segment, scoring: Scoring, shared: Shared) -> AttentionState:
    """The package flash_attn_interface.  It returns four values when asked for lse; lse is +inf if no row of the call has a
    key.

    Over an fp8 cache the library computes both products in float8.  It takes a descale factor for each row and kv head:
    q_descale of the queries, which this function rounds to float8; k_descale and v_descale, which are the layer's for all rows.
    Its output is then bfloat16.

    With many queries over large pages the library loads whole tiles of keys by TMA.  The last tile reaches past a row's end,
    where slots may never have been written: they get weight 0, but 0 * NaN is NaN.  Given cache_leftpad, which is 0 here, the
    library loads exactly the row's keys.
    """
    from flash_attn_interface import flash_attn_with_kvcache

    dtype, options = q_THD.dtype, dict[str, Tensor]()
    if isinstance(view, QuantView):
        assert view.scale_2K is not None and not view.needs_scale, "flash-attn 3 reads 8-bit caches with a scale for each head"
        k_RK, v_RK = view.scale_2K[:, None].expand(-1, segment.rows, -1)
        q_THD, q_RK = float8_queries(q_THD, segment.cu_seqlens_q, segment.max_seqlen_q, k_RK.shape[1])
        options = dict(q_descale=q_RK, k_descale=k_RK, v_descale=v_RK)
    if segment.pages.page_size >= MIN_TILE:
        options["cache_leftpad"] = _no_leftpad(segment.rows, q_THD.device)
    k, v = _pages(q_THD, view, segment, scoring)
    out_THD, lse_HT, *_ = flash_attn_with_kvcache(
        q_THD, k, v, cache_seqlens=segment.cache_seqlens, page_table=segment.pages.table, cu_seqlens_q=segment.cu_seqlens_q,
        max_seqlen_q=segment.max_seqlen_q, softmax_scale=scoring.scale, causal=segment.causal,
        window_size=(-1, -1) if segment.window is None else (segment.window - 1, 0), softcap=scoring.softcap or 0.0,
        return_softmax_lse=True, **options,
    )  # fmt: skip
    return _state(out_THD.to(dtype), _without_inf(lse_HT.t()), segment, shared)


@kept
def _no_leftpad(rows: int, device: torch.device) -> Tensor:
    return torch.zeros(rows, dtype=torch.int32, device=device)


def fa4_state(q_THD: Tensor, view: FlashView, segment: Segment, scoring: Scoring, shared: Shared) -> AttentionState:
    """The package flash_attn.cute.

    It compiles at the first call of each dtype, head shape, causality and softcap.  That call must not happen inside a graph
    capture.
    """
    flash_attn_varlen_func = _fa4()
    k, v = _pages(q_THD, view, segment, scoring)
    out_THD, lse_HT, *_ = flash_attn_varlen_func(
        q_THD, k, v, cu_seqlens_q=segment.cu_seqlens_q, max_seqlen_q=segment.max_seqlen_q, seqused_k=segment.cache_seqlens,
        page_table=segment.pages.table, softmax_scale=scoring.scale, causal=segment.causal, softcap=scoring.softcap or 0.0,
        return_lse=True,
    )  # fmt: skip
    return _state(out_THD, lse_HT.t(), segment, shared)


@cache
def _fa4() -> Callable[..., tuple[Tensor, Tensor]]:
    from flash_attn.cute.interface import flash_attn_varlen_func

    # flash-attn 4 triggers this warning with an argument of its own, at every compilation.
    warnings.filterwarnings("ignore", message="Argument aux_data .* cannot be converted to a JitArgument")
    return flash_attn_varlen_func


ADAPTERS: dict[str, Adapter] = {"fa2": fa2_state, "fa3": fa3_state, "fa4": fa4_state}


def _pages(q_THD: Tensor, view: FlashView, segment: Segment, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Keys and values [pages, P, K, D], as views of the cache; asserts that the adapters can answer this segment."""
    assert can_express(segment), "queries differ in first keys, windows or positions: our kernel reads such segments"
    assert q_THD.dtype == view.kv.dtype, f"queries are {q_THD.dtype}, the cache is {view.kv.dtype}"
    pages = view.kv.unflatten(0, (-1, segment.pages.page_size))
    return pages[:, :, 0], pages[:, :, 1]


def _without_inf(lse_TH: Tensor) -> Tensor:
    """lse, which the library has just written, with -inf in place of +inf, which it gives queries without keys."""
    return lse_TH.nan_to_num_(nan=torch.nan, posinf=-torch.inf, neginf=-torch.inf)


def _state(out_THD: Tensor, lse_TH: Tensor, segment: Segment, shared: Shared) -> AttentionState:
    """The state; lse_TH is changed where queries read nothing of their row."""
    if segment.whole_or_none:
        assert segment.rows == 1 and segment.starts_T is not None
        name = ("absent", id(segment))
        if name not in shared:
            shared[name] = (segment.starts_T >= segment.cache_seqlens)[:, None]
        lse_TH.masked_fill_(shared[name], -torch.inf)
    return AttentionState(out_THD, lse_TH)
