"""Stand-ins for the flash-attn packages: their signatures and quirks, dense arithmetic inside.  For machines without a GPU, or
without the packages.

Signatures as of flash_attn 2.8, its hopper/ folder, and flash-attn-4 4.0.0b36.  Quirks: what each refuses, layouts of lse,
what a query without keys comes back with, extra return values, causal masks aligned at the bottom right.

Shapes: B rows, n queries of a row, T queries, H heads, K kv heads, D head dim, N keys of a row, P page size.
"""

import atexit
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.attention.flash import adapters
from specdec.attention.kinds import Scoring
from toolkit.attention import fake_flashmla
from toolkit.oracles.attention import causal_mask, dense_attention

FP8 = torch.float8_e4m3fn
VERSIONS = {"flash-attn": "2.8.3", "flash-attn-3": "3.0.0", "flash-attn-4": "4.0.0b36", "triton": "3.6.0"}
VERSIONS["flash_mla"] = "1.0.0"


def install(
    monkeypatch: pytest.MonkeyPatch, versions: Mapping[str, str] = VERSIONS, flash_mla: ModuleType | None = None,
    **others: Callable[..., Any] | None,
) -> None:  # fmt: skip
    """Makes all three packages, and flash_mla, importable, and lets the capability table find them in these versions.

    flash_mla: another stand-in for it.  others: other functions for fa3 and fa4.
    """
    fa2, fa3, cute, interface = (
        ModuleType(name) for name in ("flash_attn", "flash_attn_interface", "flash_attn.cute", "flash_attn.cute.interface")
    )
    fa2.flash_attn_with_kvcache, fa2.flash_attn_varlen_func = fa2_with_kvcache, fa2_varlen  # type: ignore[attr-defined]
    fa3.flash_attn_with_kvcache = others.get("fa3", fa3_with_kvcache)  # type: ignore[attr-defined]
    interface.flash_attn_varlen_func = others.get("fa4", fa4_varlen)  # type: ignore[attr-defined]
    for module in (fa2, fa3, cute, interface, flash_mla or fake_flashmla.module()):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.syspath_prepend(metadata_of(frozenset(versions.items())))
    adapters._fa4.cache_clear()


@cache
def metadata_of(versions: frozenset[tuple[str, str]]) -> str:
    """A folder with what pip would leave of packages of these names and versions."""
    folder = tempfile.mkdtemp(prefix="packages-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, version in versions:
        info = Path(folder, f"{name.replace('-', '_')}-{version}.dist-info")
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


def dense(
    q_nHD: Tensor, k_NKD: Tensor, v_NKD: Tensor, scale: float | None, causal: bool, softcap: float, empty_lse: float,
    window_size: tuple[int | None, int | None] = (-1, -1),
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One row: out [n, H, D] in q's dtype and lse [n, H] float32.  Windows count from the causal diagonal."""
    n, N = q_nHD.shape[0], k_NKD.shape[0]
    left, right = (None if side is None or side < 0 else side for side in window_size)
    seen, at_N, own_n = torch.ones(n, N, dtype=torch.bool), torch.arange(N), torch.arange(n)[:, None] + N - n
    if causal:
        seen &= causal_mask(n, N)
    if left is not None:
        seen &= at_N >= own_n - left
    if right is not None:
        seen &= at_N <= own_n + right
    out, lse = dense_attention(q_nHD, k_NKD, v_NKD, seen, Scoring(scale, softcap or None))
    return out.to(q_nHD.dtype), torch.where(lse == -torch.inf, empty_lse, lse).float()


def paged(cache: Tensor, table_W: Tensor, length: int) -> Tensor:
    """The row's keys [N, K, D], of a cache [pages, P, K, D]."""
    used = table_W[: -(-length // cache.shape[1])].long()
    return cache[used].flatten(0, 1)[:length]


def ragged(
    q_THD: Tensor, cu_seqlens_q: Tensor, k: Tensor, v: Tensor, table: Tensor, lens: list[int], *args: Any,
    descales: tuple[Tensor | None, ...] = (None, None, None),
) -> Any:  # fmt: skip
    """Ragged rows, one after the other: out [T, H, D], lse [H, T].  descales: of queries, keys and values, [R, K] each."""
    assert cu_seqlens_q.dtype == table.dtype == torch.int32
    bounds, states = cu_seqlens_q.tolist(), []
    assert bounds[-1] == q_THD.shape[0] and len(bounds) == len(lens) + 1
    for row, (start, end, pages, length) in enumerate(zip(bounds, bounds[1:], table, lens, strict=False)):
        tensors = (q_THD[start:end], paged(k, pages, length), paged(v, pages, length))
        if q_THD.dtype == FP8:
            tensors = tuple(in_16_bit(x, factor[row]) for x, factor in zip(tensors, descales, strict=True))
        states.append(dense(*tensors, *args))
    return torch.cat([out for out, _ in states]), torch.cat([lse for _, lse in states]).t().contiguous()


def in_16_bit(x_NHD: Tensor, descale_K: Tensor) -> Tensor:
    """Float8 numbers times the factor of their kv head, in float64: `dense` rounds what comes out."""
    return x_NHD.double() * descale_K.double().repeat_interleave(x_NHD.shape[1] // len(descale_K))[:, None]


def check_descales(rows: int, kv_heads: int, *descales: Tensor | None) -> None:
    for descale in descales:
        assert descale is not None and descale.shape == (rows, kv_heads) and descale.dtype == torch.float32


def check_cache(q: Tensor, k: Tensor, v: Tensor) -> None:
    assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.float16, torch.bfloat16), "FlashAttention only supports 16 bit"
    check_shapes(q, k, v, 8)


def check_shapes(q: Tensor, k: Tensor, v: Tensor, multiple: int) -> None:
    assert k.stride(-1) == 1 and v.stride(-1) == 1 and k.dim() == v.dim() == 4
    assert q.shape[-1] <= 256 and q.shape[-1] % multiple == 0 and q.shape[-2] % k.shape[-2] == 0


def fa2_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    check_cache(q, k_cache, v_cache)
    if k_cache.shape[1] % 256:
        raise RuntimeError("Paged KV cache block size must be divisible by 256")
    assert q.dim() == 4 and k is None and cache_seqlens.dtype == torch.int32
    B, n = q.shape[:2]
    cu = torch.arange(0, (B + 1) * n, n, dtype=torch.int32)
    lens, args = cache_seqlens.tolist(), (softmax_scale, causal, softcap, torch.inf, window_size)
    out, lse_HT = ragged(q.flatten(0, 1), cu, k_cache, v_cache, block_table, lens, *args)
    lse_BHn = lse_HT.view(-1, B, n).transpose(0, 1).contiguous()
    return (out.view(q.shape), lse_BHn) if return_softmax_lse else out.view(q.shape)


def fa2_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    check_cache(q, k, v)
    if k.shape[1] % 256:
        raise RuntimeError("Paged KV cache block size must be divisible by 256")
    assert cu_seqlens_k.dtype == torch.int32 and cu_seqlens_k.shape == cu_seqlens_q.shape and max_seqlen_q > 1
    lens = cu_seqlens_k.diff().tolist()
    assert max(lens) <= max_seqlen_k
    out, lse_HT = ragged(q, cu_seqlens_q, k, v, block_table, lens, softmax_scale, causal, softcap, torch.inf, window_size)
    return (out, lse_HT, None) if return_attn_probs else out


def fa3_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
    q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0,
    softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
    return_softmax_lse=False,
):  # fmt: skip
    if q.dtype == FP8:
        assert k_cache.dtype == v_cache.dtype == FP8
        check_shapes(q, k_cache, v_cache, 16)
        check_descales(len(cache_seqlens), k_cache.shape[2], q_descale, k_descale, v_descale)
    else:
        check_cache(q, k_cache, v_cache)
        assert q_descale is k_descale is v_descale is None
    assert q.dim() == 3 and isinstance(max_seqlen_q, int) and attention_chunk == 0 and scheduler_metadata is None
    assert int(cu_seqlens_q.diff().max()) <= max_seqlen_q and cache_seqlens.dtype == torch.int32
    lens = cache_seqlens.tolist()
    empty = -torch.inf if any(lens) else torch.inf  # the library returns +inf if a call reads no key at all
    args, descales = (softmax_scale, causal, softcap, empty, window_size), (q_descale, k_descale, v_descale)
    out, lse_HT = ragged(q, cu_seqlens_q, k_cache, v_cache, page_table, lens, *args, descales=descales)
    out = out.bfloat16() if q.dtype == FP8 else out
    if k_cache.shape[1] >= 64 and cache_leftpad is None:  # it copies whole tiles, and weighs what nobody may read by 0
        bounds, P = cu_seqlens_q.tolist(), k_cache.shape[1]
        for row, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
            out[start:end] += 0 * paged(v_cache, page_table[row], -(-lens[row] // P) * P).to(out.dtype).sum()
    return (out, lse_HT, None, None) if return_softmax_lse else out


def fa4_varlen(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None,
    seqused_q=None, seqused_k=None, gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False,
    window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
    score_mod=None, score_mod_bwd=None, mask_mod=None, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None,
    return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None, disable_scheduler_metadata=False,
    gather_bwd_recompute_p=False, gather_bwd_token_chunk=None,
):  # fmt: skip
    check_cache(q, k, v)
    assert cu_seqlens_k is None, "page_table is not supported with cu_seqlens_k"
    assert seqused_k.dtype == torch.int32 and num_splits == 1 and learnable_sink is None
    args = (softmax_scale, causal, softcap, -torch.inf, window_size)
    out, lse_HT = ragged(q, cu_seqlens_q, k, v, page_table, seqused_k.tolist(), *args)
    return out, lse_HT if return_lse else None
