"""Layers of MiMo-V2-Flash: heads whose values are narrower than their keys and multiplied with a number, with sinks or without.

The model around them is CausalLM.

Shapes: T tokens, R rows asked for, H hidden size, Q query heads, K key/value heads, D key dimension, E value dimension.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from specdec.attention.inputs import AttentionFn, HeadInputs, LayerInputs, RowInputs
from specdec.attention.kinds import Scoring
from specdec.models.causal_lm import PreNormLayer
from specdec.models.config import NO_ROPE
from specdec.models.layers import SelfAttention
from specdec.models.making import made_now
from specdec.models.mimo_v2.config import MiMoConfig
from specdec.models.mixtures.layer import mlp_of
from specdec.ops.products.partials import Partials
from specdec.ops.rope import HeadPrep, Rotation, ValuePrep


class SplitAttention(SelfAttention):
    """Attention over values of a width of their own.  config: that of the layer.  sinks_Q: float32; None: it has none."""

    def __init__(self, config: MiMoConfig) -> None:
        super().__init__(config, config.hidden_size)
        self.value_dim, self.values = config.heads.value_dim, ValuePrep(scale=config.value_scale)
        empty = torch.empty(config.num_heads, dtype=torch.float32, device=made_now().device)
        self.sinks_Q = nn.Buffer(empty) if config.has_sinks else None

    def forward(
        self, x_TH: Tensor, rotation: Rotation, attn: AttentionFn, layer: int, rows_R: Tensor | None = None
    ) -> Tensor | Partials:
        """As of SelfAttention."""
        assert self.rope.kind != NO_ROPE
        inputs = self._inputs(self.qkv_proj(x_TH), rotation)
        return self.o_proj(attn(layer, inputs, rows_R, self.scoring).flatten(1), partials=True)

    def _inputs(self, qkv: Tensor, rotation: Rotation) -> LayerInputs:
        """qkv: [T, (Q + K) D + K E]."""
        prep = HeadPrep(rotation, self.num_kv_heads, values=self.values)
        if self.value_dim == self.head_dim:
            return HeadInputs(qkv.unflatten(-1, (-1, self.head_dim)), prep)
        return RowInputs(qkv, self.head_dim, self.value_dim, prep)

    @property
    def scoring(self) -> Scoring:
        return Scoring(sinks_H=self.sinks_Q)


def mimo_layer(config: MiMoConfig, index: int) -> PreNormLayer:
    """A decoder layer with the heads of its kind."""
    return PreNormLayer(config, SplitAttention(cast(MiMoConfig, config.with_heads_of(index))), mlp_of(config, index))
