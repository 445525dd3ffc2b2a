"""Attention whose norms see all heads of a token together: one of its queries, and one of its keys (MiniMax-M2, OLMoE).

Ranks that share the heads add up their sums of squares first, two numbers a token.  This file knows no expert.

Shapes: T tokens, Q query heads, K kv heads, X = Q + 2K, D head dim.
"""

from __future__ import annotations

from torch import Tensor

from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.loader import copy_run, fill_attention, pairs_of
from specdec.models.config import ModelConfig
from specdec.models.layers import RMSNorm, SelfAttention
from specdec.models.linear import Stored
from specdec.ops.norm import norm_parts, part_squares


class WideNormAttention(SelfAttention):
    """SelfAttention with norms of Q * D and of K * D values, and of those of other ranks."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.hidden_size)
        assert not config.qk_norm
        self.q_norm = RMSNorm(config.num_heads * config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.num_kv_heads * config.head_dim, config.rms_norm_eps)

    def project(self, x_TH: Tensor) -> Tensor:
        qkv, group = self.qkv_proj(x_TH), self.q_norm.group
        weights, squares_T2 = (self.q_norm.weight, self.k_norm.weight), None
        if group.size > 1:  # a kv head that several ranks hold counts as often in both, the squares and their number
            squares_T2 = group.all_reduce(part_squares(qkv, [len(weight) for weight in weights]))
        return norm_parts(qkv, weights, self.q_norm.eps, squares_T2, group.size).unflatten(-1, (-1, self.head_dim))


def fill_wide_norms(attention: WideNormAttention, checkpoint: Checkpoint, prefix: str) -> None:
    """As `fill_attention`, and the two norms, whose values move with the rows that they norm."""
    fill_attention(attention, checkpoint, prefix)
    for name, part in (("q_norm", "q_proj"), ("k_norm", "k_proj")):
        start, whole = attention.qkv_proj.rows_of(part)
        stored = Stored(getattr(attention, name).weight, (whole,), start=start)
        copy_run(stored, checkpoint, f"{prefix}.{name}.weight", pairs_of(attention))
