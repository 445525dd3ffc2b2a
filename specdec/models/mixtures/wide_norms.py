"""Attention whose norms see all heads of a token together: one of its queries, and one of its keys (MiniMax-M2).

A rank that has some of the heads can't norm them alone, so that ranks can't share such a model.  This file knows no expert.

Shapes: T tokens, Q query heads, K kv heads, X = Q + 2K, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.loader import copy_, fill_attention, pairs_of
from specdec.models.config import ModelConfig
from specdec.models.layers import RMSNorm, SelfAttention


class WideNormAttention(SelfAttention):
    """SelfAttention with norms of Q * D and of K * D values."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.hidden_size)
        assert config.shard.size == 1 and not config.qk_norm
        self.q_norm = RMSNorm(config.num_heads * config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.num_kv_heads * config.head_dim, config.rms_norm_eps)

    def project(self, x_TH: Tensor) -> Tensor:
        q, k, v = self.qkv_proj(x_TH).split(list(self.qkv_proj.parts.sizes.values()), dim=-1)
        normed = torch.cat((self.q_norm(q.contiguous()), self.k_norm(k.contiguous()), v), dim=-1)
        return normed.unflatten(-1, (-1, self.head_dim))


def fill_wide_norms(attention: WideNormAttention, checkpoint: Checkpoint, prefix: str) -> None:
    """As `fill_attention`, and the two norms, whose values move with the rows that they norm."""
    fill_attention(attention, checkpoint, prefix)
    for name in ("q_norm", "k_norm"):
        copy_(getattr(attention, name).weight, checkpoint, f"{prefix}.{name}.weight", pairs_of(attention))
