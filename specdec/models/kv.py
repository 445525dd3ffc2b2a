"""What a model's layers store for each token: in which cache, in how many bytes, and for how many query heads.

This file knows model configs and caches; it knows neither pages nor requests.

kv_cache_dtype is, in all functions, the setting of that name: "auto" stores keys and values in the model's own dtype, while
"fp8" and "int8" quantise them.  A config's head_dim is the dimension of every key and value head; only with latent attention
(MLA) it is the rotated part of a key, which is stored beside the latent.
"""

from __future__ import annotations

import torch
from torch import nn

from specdec.attention.caches.kv_cache import KVCache, MHACache
from specdec.attention.caches.mla_cache import MLACache
from specdec.attention.caches.quant_cache import QuantCache, kv_bytes_per_token
from specdec.models.checkpoints.kv_scales import kv_scales
from specdec.models.config import ModelConfig
from specdec.models.deepseek.config import DeepseekConfig
from specdec.models.diffllama.config import DiffLlamaConfig


def keeps_latents(config: ModelConfig) -> bool:
    """Whether the model stores one latent vector a token that all heads share (multi-head latent attention, MLA)."""
    return isinstance(config, DeepseekConfig)


def split_widths(*configs: ModelConfig) -> tuple[int, ...]:
    """The widths of values that are not as wide as their keys; those of differential attention are as wide as two heads."""
    widths = [2 * c.head_dim if isinstance(c, DiffLlamaConfig) else c.value_width for c in configs]
    return tuple(dict.fromkeys(width for width in widths if width))


def kv_token_bytes(config: ModelConfig, kv_cache_dtype: str, dtype: torch.dtype) -> int:
    """Bytes that one token takes in the caches of all layers.  dtype: the model's; latents are always stored in it."""
    if isinstance(config, DeepseekConfig):
        return config.num_layers * (config.rank + config.head_dim) * dtype.itemsize
    return kv_bytes_per_token(kv_cache_dtype, dtype, config.num_layers, config.num_kv_heads, config.head_dim)


def heads_a_key(config: ModelConfig) -> int:
    """How many query heads read the same key: all of them with latent attention, else the size of a GQA group."""
    return config.num_heads if keeps_latents(config) else config.num_heads // config.num_kv_heads


def make_cache(
    model: nn.Module, config: ModelConfig, num_slots: int, kv_cache_dtype: str, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """An empty cache of num_slots tokens for all layers of a model.

    model: the module with that config; an fp8 cache uses the scales of keys and values that the model's checkpoint brought.
    """
    layers, heads, dim, kinds = config.num_layers, config.num_kv_heads, config.head_dim, config.layer_kinds
    if isinstance(config, DeepseekConfig):
        return MLACache(layers, num_slots, config.rank, dim, dtype=dtype, device=device, kinds=kinds)
    if kv_cache_dtype == "auto":
        return MHACache(layers, num_slots, heads, dim, dtype=dtype, device=device, kinds=kinds)
    return QuantCache(kv_cache_dtype, layers, num_slots, heads, dim, device=device, kinds=kinds, scales=kv_scales(model))
