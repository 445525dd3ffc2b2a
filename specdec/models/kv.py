"""What a model's layers keep of a token: which cache holds it, how many bytes that is, and how many heads read it.

Knows configs and caches, neither pages nor requests.
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


def keeps_latents(config: ModelConfig) -> bool:
    """Whether a token's keys and values are one latent vector that all heads share (MLA)."""
    return isinstance(config, DeepseekConfig)


def kv_token_bytes(config: ModelConfig, kept: str, dtype: torch.dtype) -> int:
    """Bytes of one token in all layers.  kept: as kv_cache_dtype.  dtype: the model's, which "auto" keeps."""
    if isinstance(config, DeepseekConfig):
        return config.num_layers * (config.rank + config.head_dim) * dtype.itemsize
    return kv_bytes_per_token(kept, dtype, config.num_layers, config.num_kv_heads, config.head_dim)


def heads_a_key(config: ModelConfig) -> int:
    """Query heads that read the same key."""
    return config.num_heads if keeps_latents(config) else config.num_heads // config.num_kv_heads


def make_cache(
    model: nn.Module, config: ModelConfig, num_slots: int, kept: str, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """The cache of a model with that config.  kept: as kv_cache_dtype.  model: only fp8 reads its scales."""
    layers, heads, dim, kinds = config.num_layers, config.num_kv_heads, config.head_dim, config.layer_kinds
    if isinstance(config, DeepseekConfig):
        return MLACache(layers, num_slots, config.rank, dim, dtype=dtype, device=device, kinds=kinds)
    if kept == "auto":
        return MHACache(layers, num_slots, heads, dim, dtype=dtype, device=device, kinds=kinds)
    return QuantCache(kept, layers, num_slots, heads, dim, device=device, kinds=kinds, scales=kv_scales(model))
