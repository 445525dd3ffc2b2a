"""What a model's layers store for each token: in which cache, and in how many bytes.

This file knows model configs and caches; it knows neither pages nor requests.

kv_cache_dtype is, in all functions, the setting of that name: "auto" stores keys and values in the model's own dtype, while
"fp8" and "int8" quantise them, and "int8_keys" quantises keys alone.  "fp8_ds_mla" quantises latents; a draft head with
ordinary heads then stores its few keys and values in its own dtype.  With latent attention (MLA) a config's head_dim is the
rotated part of a key, which is stored beside the latent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specdec.attention.caches.fp8_latent import FP8_LATENTS, Fp8LatentLayout
from specdec.attention.caches.heads_cache import HeadsLayout
from specdec.attention.caches.int8_keys import INT8_KEYS, Int8KeysLayout
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.caches.layout import CacheLayout, UnlikeLayout
from specdec.attention.caches.mla_cache import LatentLayout
from specdec.attention.caches.quant_cache import QuantLayout
from specdec.attention.caches.sparse_cache import LatentFormat, SparseLatentLayout
from specdec.attention.caches.split_cache import QuantSplitLayout, SplitLayout
from specdec.models.checkpoints.kv_scales import kv_scales
from specdec.models.config import HeadSizes, ModelConfig


def cache_layout(
    config: ModelConfig,
    kv_cache_dtype: str,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    scales: Sequence[Tensor | None] = (),
    int8_queries: bool = False,
) -> CacheLayout:
    """What each layer of a model of that config keeps of a token.

    dtype: the model's.  scales: of an fp8 cache, the checkpoint's scales by layer.
    int8_queries: whether attention over int8 keys rounds queries to int8.
    """
    if config.keeps_latents:
        latents: LatentFormat = LatentLayout(config.latent_rank, config.head_dim, dtype)
        if kv_cache_dtype == FP8_LATENTS:
            latents = Fp8LatentLayout(config.latent_rank, config.head_dim)
        if (index := config.indexer) is None:
            return latents
        return SparseLatentLayout(latents, index.head_dim, dtype, tuple(sorted(set(index.sources))))

    def of_heads(heads: HeadSizes) -> CacheLayout:
        K, D = heads.num_kv_heads, heads.head_dim
        if kv_cache_dtype in ("auto", FP8_LATENTS):
            return SplitLayout(K, D, heads.value_width, dtype) if heads.value_width else HeadsLayout(K, D, dtype)
        if heads.value_width:
            assert kv_cache_dtype != INT8_KEYS, "the capability table refuses it for such models"
            return QuantSplitLayout(kv_cache_dtype, K, D, heads.value_width, device, scales, int8_queries)
        if kv_cache_dtype == INT8_KEYS:
            return Int8KeysLayout(K, D, dtype, int8_queries)
        return QuantLayout(kv_cache_dtype, K, D, device, scales, int8_queries)

    layers = [config.heads_of(layer) for layer in range(config.num_layers)]
    stored = {(heads.num_kv_heads, heads.head_dim, heads.value_width): heads for heads in config.all_heads or layers}
    layouts, sizes = tuple(map(of_heads, stored.values())), list(stored)
    if len(layouts) == 1:
        return layouts[0]
    numbers = [sizes.index(own) if (own := (h.num_kv_heads, h.head_dim, h.value_width)) in stored else 0 for h in layers]
    return UnlikeLayout(layouts, tuple(numbers))


def token_bytes_by_kind(config: ModelConfig, kv_cache_dtype: str, dtype: torch.dtype) -> dict[str, int]:
    """The bytes of one token's keys and values in all layers of a kind together, by the kind's name.  dtype: the model's."""
    layout, found = cache_layout(config, kv_cache_dtype, dtype), dict[str, int]()
    for layer in sorted(set(config.key_sources)):
        kind = str(config.layer_kinds[layer])
        found[kind] = found.get(kind, 0) + layout.layer_bytes(layer)
    return found


def kv_read_bytes(
    config: ModelConfig, kv_cache_dtype: str, dtype: torch.dtype, context: float, layers: Sequence[int] | None = None
) -> float:
    """Bytes that layers read at least of a sequence of `context` tokens.  Layers that share keys and values each read them.

    dtype: the model's.  layers: those that store what is read, each as often as it is read; None: all of the model's do.
    Where an indexer chooses, its layers read all of its keys, and each layer the latents of the most tokens that a query reads.
    """
    layout = cache_layout(config, kv_cache_dtype, dtype)
    token = sum(map(layout.layer_bytes, config.key_sources if layers is None else layers))
    if (index := config.indexer) is None:
        return context * token
    keys = len(set(index.sources)) * index.head_dim * dtype.itemsize
    return context * keys + min(context, index.topk) * (token - keys)


def make_cache(
    model: nn.Module,
    config: ModelConfig,
    num_slots: int | Sequence[int],
    kv_cache_dtype: str,
    dtype: torch.dtype,
    device: torch.device,
    groups: Sequence[int] | None = None,
    int8_queries: bool = False,
) -> KVCache:
    """An empty cache for all layers of a model.

    num_slots, groups: see KVCache.  int8_queries: see cache_layout.
    model: the module with that config; an fp8 cache uses the scales of keys and values that the model's checkpoint brought.
    """
    layout = cache_layout(config, kv_cache_dtype, dtype, device, kv_scales(model, config.layer_kinds), int8_queries)
    kv_layers = config.kv_source
    return KVCache(layout, config.layer_kinds, num_slots, groups=groups, device=device, kv_layers=kv_layers)
