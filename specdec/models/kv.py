"""What a model's layers store for each token: in which cache, in how many bytes, and for how many query heads.

This file knows model configs and caches; it knows neither pages nor requests.

kv_cache_dtype is, in all functions, the setting of that name: "auto" stores keys and values in the model's own dtype, while
"fp8" and "int8" quantise them, and "int8_keys" quantises keys alone.  "fp8_ds_mla" quantises latents; a draft head with
ordinary heads then stores its few keys and values in its own dtype.  A config's head_dim is the dimension of every key and
value head; only with latent attention (MLA) it is the rotated part of a key, which is stored beside the latent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from specdec.attention.caches.fp8_latent import FP8_LATENTS, Fp8LatentLayout
from specdec.attention.caches.heads_cache import HeadsLayout
from specdec.attention.caches.int8_keys import INT8_KEYS, Int8KeysLayout
from specdec.attention.caches.kv_cache import KVCache
from specdec.attention.caches.mla_cache import LatentLayout
from specdec.attention.caches.planes import CacheLayout
from specdec.attention.caches.quant_cache import QuantLayout
from specdec.attention.caches.sparse_cache import LatentFormat, SparseLatentLayout
from specdec.attention.caches.split_cache import SplitLayout
from specdec.models.checkpoints.kv_scales import kv_scales
from specdec.models.config import ModelConfig
from specdec.models.deepseek.config import DeepseekConfig
from specdec.models.diffllama.config import DiffLlamaConfig


def keeps_latents(config: ModelConfig) -> bool:
    """Whether the model stores one latent vector a token that all heads share (multi-head latent attention, MLA)."""
    return isinstance(config, DeepseekConfig)


def latent_rank(config: ModelConfig) -> int:
    """How many numbers of a token's latent are not rotated; 0 if the model keeps no latents."""
    return config.rank if isinstance(config, DeepseekConfig) else 0


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


def split_widths(*configs: ModelConfig) -> tuple[int, ...]:
    """The widths of values that are not as wide as their keys; those of differential attention are as wide as two heads."""
    widths = [2 * c.head_dim if isinstance(c, DiffLlamaConfig) else c.value_width for c in configs]
    return tuple(dict.fromkeys(width for width in widths if width))


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
    if isinstance(config, DeepseekConfig):
        latents: LatentFormat = LatentLayout(config.rank, config.head_dim, dtype)
        if kv_cache_dtype == FP8_LATENTS:
            latents = Fp8LatentLayout(config.rank, config.head_dim)
        if (index := config.indexer) is None:
            return latents
        return SparseLatentLayout(latents, index.head_dim, dtype, tuple(sorted(set(index.sources))))
    if kv_cache_dtype in ("auto", FP8_LATENTS) and config.value_width:
        return SplitLayout(config.num_kv_heads, config.head_dim, config.value_width, dtype)
    if kv_cache_dtype in ("auto", FP8_LATENTS):
        return HeadsLayout(config.num_kv_heads, config.head_dim, dtype)
    assert not split_widths(config), "the capability table refuses 8-bit caches for such models"
    if kv_cache_dtype == INT8_KEYS:
        return Int8KeysLayout(config.num_kv_heads, config.head_dim, dtype, int8_queries)
    return QuantLayout(kv_cache_dtype, config.num_kv_heads, config.head_dim, device, scales, int8_queries)


def kv_read_bytes(config: ModelConfig, kv_cache_dtype: str, dtype: torch.dtype, context: float) -> float:
    """Bytes that all layers read at least of a sequence of `context` tokens.  Layers that share keys and values each read them.

    dtype: the model's.
    Where an indexer chooses, its layers read all of its keys, and each layer the latents of the most tokens that a query reads.
    """
    layout = cache_layout(config, kv_cache_dtype, dtype)
    token = sum(map(layout.layer_bytes, config.kv_source))
    if not isinstance(config, DeepseekConfig) or (index := config.indexer) is None:
        return context * token
    keys = len(set(index.sources)) * index.head_dim * dtype.itemsize
    return context * keys + min(context, index.topk) * (token - keys)


def head_dims(config: ModelConfig) -> tuple[int, ...]:
    """The head dims of a model's attention, its encoder's included; none for latent attention."""
    own = () if keeps_latents(config) else (config.head_dim,)
    return own if config.encoder is None else (*own, config.encoder.head_dim)


def kv_holders(config: ModelConfig, ranks: int) -> int:
    """How many of `ranks` ranks that share a model hold the same keys and values of a token.  config: the whole model's."""
    return ranks if keeps_latents(config) else max(1, ranks // config.num_kv_heads)


def heads_a_key(config: ModelConfig) -> int:
    """How many query heads read the same key: all of them with latent attention, else the size of a GQA group."""
    return config.num_heads if keeps_latents(config) else config.num_heads // config.num_kv_heads


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
    layout = cache_layout(config, kv_cache_dtype, dtype, device, kv_scales(model), int8_queries)
    sources = config.kv_source
    return KVCache(layout, config.layer_kinds, num_slots, groups=groups, device=device, sources=sources)
