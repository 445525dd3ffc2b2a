"""FlashMLA for tests and measurements: the package `flash_mla`, or vLLM's build of its operators under the package's names.

DeepSeek's package has no wheel on PyPI.  vLLM builds the same kernels as torch operators, in a file `_flashmla_C.abi3.so`;
where that file lies on the Python path, `library()` gives its operators the three calls that the package offers.  This module
knows no cache and no plan of specdec.

Shapes: B rows, n queries of each, T queries, H heads, L latent width, C value width, P page size, I indices of a query.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

FILE = "_flashmla_C"


@dataclass
class Schedule:
    """How a call's work is divided over the GPU, from its first call on; calls with the same lengths share it."""

    metadata: Tensor | None = None
    splits: Tensor | None = None


def get_mla_metadata(*_: Any) -> tuple[Schedule, None]:
    return Schedule(), None


def flash_mla_with_kvcache(
    q: Tensor, k_cache: Tensor, block_table: Tensor | None, cache_seqlens: Tensor | None, head_dim_v: int,
    tile_scheduler_metadata: Schedule, num_splits: None = None, softmax_scale: float | None = None, causal: bool = False,
    is_fp8_kvcache: bool = False, indices: Tensor | None = None, topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out [B, n, H, C] and lse [B, H, n] of q [B, n, H, L]: over pages [pages, P, 1, L], or over rows of indices [B, n, I]."""
    operators, plan = torch.ops._flashmla_C, tile_scheduler_metadata
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if indices is None:
        out, lse, plan.metadata, plan.splits = operators.dense_decode_fwd(
            q, k_cache, head_dim_v, cache_seqlens, block_table, scale, causal, plan.metadata, plan.splits, None
        )
        return out, lse
    assert is_fp8_kvcache and not causal
    out, lse, plan.metadata, plan.splits = operators.sparse_decode_fwd(
        q, k_cache, indices, topk_length, None, plan.metadata, plan.splits, None, None, None, head_dim_v, scale, None
    )
    return out, lse


def flash_mla_sparse_fwd(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int = 512, attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """out [T, H, C], the largest logits and lse [T, H] of q [T, H, L] over the rows `indices` [T, 1, I] of kv [slots, 1, L]."""
    operator = torch.ops._flashmla_C.sparse_prefill_fwd
    out, most, lse = operator(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, None)
    return out, most, lse


def library() -> ModuleType | None:
    """The package; or vLLM's operators, which from then on are imported under its name; None if neither is there."""
    try:
        return importlib.import_module("flash_mla")
    except ImportError:
        if not importlib.util.find_spec(FILE):
            return None
    importlib.import_module(FILE)
    sys.modules["flash_mla"] = sys.modules[__name__]
    return sys.modules[__name__]
