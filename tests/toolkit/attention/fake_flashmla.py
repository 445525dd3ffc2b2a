"""A stand-in for the package flash_mla where there is no Hopper GPU: its signatures and quirks, dense arithmetic inside.

Quirks: what each call refuses on a Hopper GPU, as seen with the kernels that vLLM 0.26 builds; layouts of lse; lse +inf and out
0 where no key is read; a schedule that only calls of the same shape may share; lse and out in memory of the library's own.

Shapes: B rows, n queries of each, T queries, H heads, L latent width, C value width, P page size, X slots, I slots of a row.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from specdec.attention.caches.fp8_latent import dequantise_latents
from specdec.attention.kinds import Scoring
from toolkit.oracles.attention import causal_mask, dense_attention

RANK, WIDTH, BYTES = 512, 576, 656
HALVES = (torch.float16, torch.bfloat16)


class Schedule:
    def __init__(self) -> None:
        self.made_for: tuple[Any, ...] | None = None

    def use(self, *call: Any) -> None:
        assert self.made_for in (None, call), f"a schedule of {self.made_for} was given to a call of {call}"
        self.made_for = call


def module(lse: Callable[[Tensor], Tensor] = lambda lse: lse) -> ModuleType:
    """lse: what each call makes of its own."""

    def with_kvcache(*given: Any, **options: Any) -> tuple[Any, ...]:
        *others, own = flash_mla_with_kvcache(*given, **options)
        return (*others, lse(own))

    def sparse_fwd(*given: Any, **options: Any) -> tuple[Any, ...]:
        *others, own = flash_mla_sparse_fwd(*given, **options)
        return (*others, lse(own))

    result = ModuleType("flash_mla")
    functions = dict(
        get_mla_metadata=get_mla_metadata, flash_mla_with_kvcache=with_kvcache, flash_mla_sparse_fwd=sparse_fwd
    )  # fmt: skip
    vars(result).update(functions)
    return result


def get_mla_metadata(*_: Any) -> tuple[Schedule, None]:
    return Schedule(), None


def attend(q_nHL: Tensor, keys_NL: Tensor, scale: float, causal: bool = False) -> tuple[Tensor, Tensor]:
    """out [n, H, C] in q's dtype, and lse [n, H] float32."""
    k_N1L = keys_NL[:, None].double()
    seen = causal_mask(q_nHL.shape[0], len(keys_NL)) if causal else None
    out, lse = dense_attention(q_nHL.double(), k_N1L, k_N1L[..., :RANK], seen, Scoring(scale))
    return out.to(q_nHL.dtype), torch.where(lse == -torch.inf, torch.inf, lse).float()


def flash_mla_with_kvcache(
    q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits=None, softmax_scale=None,
    causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None, extra_k_cache=None, extra_indices_in_kvcache=None,
    topk_length=None, extra_topk_length=None,
):  # fmt: skip
    (B, n, H, L), schedule = q.shape, tile_scheduler_metadata
    assert isinstance(schedule, Schedule) and num_splits is None and B > 0 and (L, head_dim_v) == (WIDTH, RANK)
    scale = L**-0.5 if softmax_scale is None else softmax_scale
    if indices is None:
        pages, P, one, width = k_cache.shape
        assert (P, one, width) == (64, 1, WIDTH), "Currently page_block_size must be 64"
        assert k_cache.dtype == q.dtype and q.dtype in HALVES and not is_fp8_kvcache and topk_length is None
        assert cache_seqlens.dtype == block_table.dtype == torch.int32 and cache_seqlens.is_contiguous()
        schedule.use(B, n, H, tuple(cache_seqlens.tolist()))
        answers = []
        for queries, table, length in zip(q, block_table, cache_seqlens.tolist(), strict=True):
            keys = k_cache[table[: -(-length // P)].long(), :, 0].flatten(0, 1)[:length]
            answers.append(attend(queries, keys, scale, causal and n > 1))
    else:
        assert is_fp8_kvcache and not causal and k_cache.dtype == torch.uint8 and k_cache.shape[2:] == (1, BYTES)
        assert topk_length is None, "V3.2 does not support dynamic topk length"
        assert q.dtype == torch.bfloat16 and H in (64, 128) and indices.dtype == torch.int32 and indices.shape[:2] == (B, n)
        assert indices.shape[2] % 64 == 0, "params.topk % TOPK_BLOCK_SIZE == 0"
        schedule.use(B, n, H, indices.shape[2])
        rows_XB, answers = k_cache.flatten(0, 2), []
        for queries, selected in zip(q, indices, strict=True):
            parts = [
                attend(one[None], selected_keys(rows_XB, slots), scale) for one, slots in zip(queries, selected, strict=True)
            ]
            answers.append((torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])))
    return torch.stack([out for out, _ in answers]), torch.stack([lse for _, lse in answers]).transpose(1, 2)


def selected_keys(rows_XB: Tensor, slots_I: Tensor) -> Tensor:
    """[N, L]: the latents of the rows that are named by no -1; the library converts them to bfloat16."""
    return dequantise_latents(rows_XB[slots_I[slots_I >= 0].long()], RANK, torch.bfloat16)


def flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None):
    (T, H, L), (X, one, width), I = q.shape, kv.shape, indices.shape[2]
    assert q.dtype == kv.dtype == torch.bfloat16 and indices.dtype == torch.int32 and indices.shape == (T, 1, I)
    assert (L, width, one, d_v) == (WIDTH, WIDTH, 1, RANK) and H in (64, 128)
    assert I % 128 == 0, "params.topk % (2*B_TOPK) == 0"
    lens = [I] * T if topk_length is None else topk_length.tolist()
    answers = []
    for query, slots, length in zip(q, indices[:, 0], lens, strict=True):
        slots = slots[:length]
        answers.append(attend(query[None], kv[slots[(slots >= 0) & (slots < X)].long(), 0], sm_scale))
    out, lse = (torch.cat(parts) for parts in zip(*answers, strict=True))
    return out, torch.zeros_like(lse), lse
