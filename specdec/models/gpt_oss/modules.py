"""Layers of gpt-oss: those of a Llama with sinks and windows in its attention, and a mixture in place of an MLP.

The model around them is CausalLM.

Shapes: Q query heads.
"""

from __future__ import annotations

import torch
from torch import nn

from specdec.attention.kinds import Scoring
from specdec.models.causal_lm import PreNormLayer
from specdec.models.config import ModelConfig
from specdec.models.layers import SelfAttention
from specdec.models.making import made_now
from specdec.models.mixtures.layer import mlp_of


class SinkAttention(SelfAttention):
    """Attention whose softmax has one more logit for each head.  sinks_Q: float32."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, config.hidden_size)
        self.sinks_Q = nn.Buffer(torch.empty(config.num_heads, dtype=torch.float32, device=made_now().device))

    @property
    def scoring(self) -> Scoring:
        return Scoring(sinks_H=self.sinks_Q)


def gpt_oss_layer(config: ModelConfig, index: int) -> PreNormLayer:
    """A decoder layer with sinks and experts."""
    return PreNormLayer(config, SinkAttention(config), mlp_of(config, index))
