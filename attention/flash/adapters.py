"""Three thin adapters of the flash-attn packages: each takes a segment and returns its state.

They translate argument names, layouts of lse and conventions for empty rows; they hold no kernel.  They answer segments without
first keys, over keys in the models' own dtype (fa3: also over fp8), in pages that the library can read.  Sinks are never passed
to a library: they are added once, above the backend.

Shapes: T queries, H heads, K kv heads, D head dim, R rows, n queries of each row, P page size.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.quant_cache import QuantView
from specdec.attention.flash.queries import float8_queries
from specdec.attention.kinds import PLAIN, Scoring
from specdec.attention.pages import PageTable
from specdec.attention.segment import Segment, uniform_cu_seqlens
from specdec.attention.state import AttentionState
from specdec.ops.index import kept

MIN_TILE = 64  # keys of flash-attn 3's smallest tile: smaller pages are loaded token by token, not by TMA

FlashView = MHAView | QuantView
Adapter = Callable[[Tensor, FlashView, Segment, Scoring], AttentionState]


def fa2_state(q_THD: Tensor, view: FlashView, segment: Segment, scoring: Scoring = PLAIN) -> AttentionState:
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
        return _state(out_RnHD.flatten(0, 1), lse_RHn.transpose(1, 2).flatten(0, 1))
    cu_seqlens_k = torch.nn.functional.pad(segment.cache_seqlens.cumsum(0, dtype=torch.int32), (1, 0))
    out_THD, lse_HT, _ = flash_attn_varlen_func(
        q_THD, k, v, segment.cu_seqlens_q, cu_seqlens_k, max(n, 2), segment.max_keys, return_attn_probs=True, **options
    )  # max(n, 2): with 1 the library assumes that every row holds exactly one query, and an empty row holds none
    return _state(out_THD, lse_HT.t())


def fa3_state(q_THD: Tensor, view: FlashView, segment: Segment, scoring: Scoring = PLAIN) -> AttentionState:
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
        max_seqlen_q=segment.max_seqlen_q, softmax_scale=scoring.scale, causal=segment.causal, softcap=scoring.softcap or 0.0,
        return_softmax_lse=True, **options,
    )  # fmt: skip
    return _state(out_THD.to(dtype), lse_HT.t())


@kept
def _no_leftpad(rows: int, device: torch.device) -> Tensor:
    return torch.zeros(rows, dtype=torch.int32, device=device)


def fa4_state(q_THD: Tensor, view: FlashView, segment: Segment, scoring: Scoring = PLAIN) -> AttentionState:
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
    return AttentionState(out_THD, lse_HT.t())


@cache
def _fa4() -> Callable[..., tuple[Tensor, Tensor]]:
    from flash_attn.cute.interface import flash_attn_varlen_func

    # flash-attn 4 triggers this warning with an argument of its own, at every compilation.
    warnings.filterwarnings("ignore", message="Argument aux_data .* cannot be converted to a JitArgument")
    return flash_attn_varlen_func


ADAPTERS: dict[str, Adapter] = {"fa2": fa2_state, "fa3": fa3_state, "fa4": fa4_state}


def _pages(q_THD: Tensor, view: FlashView, segment: Segment, scoring: Scoring) -> tuple[Tensor, Tensor]:
    """Keys and values [pages, P, K, D], as views of the cache; asserts that the adapters can answer this segment."""
    assert not segment.is_per_query, "queries differ in first keys, windows or positions: our kernel reads such segments"
    assert q_THD.dtype == view.kv.dtype, f"queries are {q_THD.dtype}, the cache is {view.kv.dtype}"
    pages = view.kv.unflatten(0, (-1, segment.pages.page_size))
    return pages[:, :, 0], pages[:, :, 1]


def _state(out_THD: Tensor, lse_TH: Tensor) -> AttentionState:
    """A state whose empty rows have lse -inf instead of the library's +inf."""
    return AttentionState(out_THD, torch.where(lse_TH == torch.inf, -torch.inf, lse_TH))


@torch.inference_mode()
def check_conventions(name: str, q_THD: Tensor, view: FlashView, like: Segment) -> None:
    """Asks a library for results that are known: that lse is a natural log, that a row without keys is empty, and that the
    scales of an fp8 cache apply to the heads that they belong to.

    The check's call has the dtype and heads of q and view, and is of the kind of `like`, so the kernel that it compiles is
    needed later anyway.  Raises RuntimeError if the installed library answers otherwise.
    """
    (H, D), K, device = q_THD.shape[1:], view.kv.shape[2], q_THD.device
    n, P = min(like.max_seqlen_q, 129), min(like.pages.page_size, 256)  # 256: longer ones take the same kernels
    lens = [min(3, P), 0, min(2, P)]
    segment = Segment(
        PageTable(torch.zeros(3, 1, dtype=torch.int32, device=device), P), torch.tensor(lens, dtype=torch.int32, device=device),
        uniform_cu_seqlens(3, n, device), n, like.causal,
    )  # fmt: skip
    kv = torch.ones(P, 2, K, D, dtype=torch.float32, device=device)
    keys_K, values_K = kv.new_ones(K), kv.new_ones(K)
    asked: FlashView = MHAView(kv.to(view.kv.dtype))
    if isinstance(view, QuantView):  # every head has keys and values of its own
        keys_K = 1 / torch.arange(1, K + 1, dtype=torch.float32, device=device)
        asked, values_K = QuantView(kv.to(view.kv.dtype), torch.stack((keys_K, 2 - keys_K))), 2 - keys_K
    q_3nHD = torch.tensor([1.0, 1.0, 2.0], dtype=torch.float32, device=device)[:, None, None, None].expand(-1, n, H, D)
    out_THD, lse_TH = ADAPTERS[name](q_3nHD.flatten(0, 1).to(q_THD.dtype), asked, segment, PLAIN)
    firsts, lasts = out_THD.unflatten(0, (3, n))[:, -1, :, 0].float(), lse_TH.unflatten(0, (3, n))[:, -1]  # these read all keys
    logits_H = keys_K.repeat_interleave(H // K) * math.sqrt(D)
    want = torch.stack((logits_H + math.log(lens[0]), 2 * logits_H + math.log(lens[2])))
    apart = float((lasts[[0, 2]] - want).abs().max() / want.max())
    values_apart = float((firsts[[0, 2]] - values_K.repeat_interleave(H // K)).abs().max())
    empty = (float(lse_TH[n : 2 * n].max()), float(out_THD[n : 2 * n].abs().max()))
    if not (apart <= 1e-2 and values_apart <= 2e-2 and empty == (-math.inf, 0.0)):
        raise RuntimeError(
            f"{name}: the installed library answers lse {float(lasts[0, 0]):.4f} where the natural log is "
            f"{float(want[0, 0]):.4f} (all heads: {apart:.1%} apart, their values {values_apart:.1%}), and lse, output {empty} "
            f"where no key is read; expected (-inf, 0.0).  Nearest setting that works: attention='triton'"
        )
