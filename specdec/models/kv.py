"""What a model's layers store for each token: in which cache, in how many bytes, and for how many query heads.

This file knows model configs and caches; it knows neither pages nor requests.

kv_cache_dtype is, in all functions, the setting of that name: "auto" stores keys and values in the model's own dtype, while
"fp8" and "int8" quantise them.  A config's head_dim is the dimension of every key and value head; only with latent attention
(MLA) it is the rotated part of a key, which is stored beside the latent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specdec.attention.caches.heads_cache import HeadsLayout
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.caches.mla_cache import LatentLayout
from specdec.attention.caches.planes import CacheLayout
from specdec.attention.caches.quant_cache import QuantLayout
from specdec.attention.caches.sparse_cache import SparseLatentLayout
from specdec.models.checkpoints.kv_scales import kv_scales
from specdec.models.config import ModelConfig
from specdec.models.deepseek.config import DeepseekConfig


def keeps_latents(config: ModelConfig) -> bool:
    """Whether the model stores one latent vector a token that all heads share (multi-head latent attention, MLA)."""
    return isinstance(config, DeepseekConfig)


def most_read(config: ModelConfig) -> int | None:
    """The most keys that a query reads where an indexer chooses them (sparse attention); None: nothing is chosen."""
    return config.indexer.topk if isinstance(config, DeepseekConfig) and config.indexer is not None else None


def key_operations(config: ModelConfig) -> float:
    """How many more operations a query takes in attention for each key that comes before it, over all layers.

    Layers that read all keys take four for each head and dimension.  Where an indexer chooses the keys, only its scores grow:
    two for each of its heads and dimensions.  Layers with a window cost the same at every position.
    """
    if isinstance(config, DeepseekConfig) and (index := config.indexer) is not None:
        return 2.0 * index.heads * index.head_dim * len(set(index.sources))
    return 4.0 * config.num_heads * config.head_dim * sum(kind.span is None for kind in config.layer_kinds)


def cache_layout(
    config: ModelConfig,
    kv_cache_dtype: str,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    scales: Sequence[Tensor | None] = (),
) -> CacheLayout:
    """What each layer of a model of that config keeps of a token.

    dtype: the model's; latents are always stored in it.  scales: of an fp8 cache, the checkpoint's scales by layer.
    """
    if isinstance(config, DeepseekConfig):
        latents = LatentLayout(config.rank, config.head_dim, dtype)
        if (index := config.indexer) is None:
            return latents
        return SparseLatentLayout(latents, index.head_dim, dtype, tuple(sorted(set(index.sources))))
    if kv_cache_dtype == "auto":
        return HeadsLayout(config.num_kv_heads, config.head_dim, dtype)
    return QuantLayout(kv_cache_dtype, config.num_kv_heads, config.head_dim, device, scales)


def kv_token_bytes(config: ModelConfig, kv_cache_dtype: str, dtype: torch.dtype) -> int:
    """Bytes that one token takes in the caches of all layers.  dtype: the model's."""
    return cache_layout(config, kv_cache_dtype, dtype).token_bytes(config.num_layers)


def kv_read_bytes(config: ModelConfig, kv_cache_dtype: str, dtype: torch.dtype, context: float) -> float:
    """Bytes that a pass reads at least of a sequence of that many tokens: all that it keeps of them; where an indexer chooses,
    all of the indexer's keys, and the rest of as many tokens as a query reads.
    """
    all_of_it = kv_token_bytes(config, kv_cache_dtype, dtype)
    if not isinstance(config, DeepseekConfig) or (index := config.indexer) is None:
        return context * all_of_it
    keys = len(set(index.sources)) * index.head_dim * dtype.itemsize
    return context * keys + min(context, index.topk) * (all_of_it - keys)


def heads_a_key(config: ModelConfig) -> int:
    """How many query heads read the same key: all of them with latent attention, else the size of a GQA group."""
    return config.num_heads if keeps_latents(config) else config.num_heads // config.num_kv_heads


def make_cache(
    model: nn.Module, config: ModelConfig, num_slots: int, kv_cache_dtype: str, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """An empty cache of num_slots tokens for all layers of a model.

    model: the module with that config; an fp8 cache uses the scales of keys and values that the model's checkpoint brought.
    """
    layout = cache_layout(config, kv_cache_dtype, dtype, device, kv_scales(model))
    return KVCache(layout, config.layer_kinds, num_slots, device=device)
