"""Targets of the DeepSeek V2 and V3 families: multi-head latent attention, dense layers and mixtures of experts.

The signature is CausalLM's, whose forward pass this is with other layers.  Attention comes in as anywhere and is asked for
its way with latents (`attention/latent/latent.py`), which decides what is projected where.  Knows no phase, page or tree.

Shapes: T tokens, H heads, C latent rank, R rotated dim, N not rotated dim, V value dim, L = C + R, Q = N + R, X = N + V.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdec.attention.kinds import Scoring
from specdec.attention.latent.latent import HasLatent, LatentPrep
from specdec.models.causal_lm import CausalLM, DecoderLayer
from specdec.models.config import ModelConfig
from specdec.models.deepseek.config import DeepseekConfig
from specdec.models.experts import MixtureOfExperts
from specdec.models.layers import MLP, Linear, RMSNorm
from specdec.ops.rope import Rotation

LATENT_EPS = 1e-6  # of the norms inside of attention, whatever the config says of the others


class LatentAttention(nn.Module):
    """One projection in (queries, or what they are projected from, and the latent), attention, one projection out.

    kv_b_HXC: from a latent to each head's keys and values.
    """

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        H, C, R, N, V = config.num_heads, config.rank, config.head_dim, config.nope_dim, config.value_dim
        self.scoring = Scoring(scale=config.scale)
        self.query_dim = N + R
        self.splits = (H * (N + R) if config.q_rank is None else config.q_rank, C + R)
        self.in_proj = Linear(config.hidden_size, sum(self.splits), bias=config.qkv_bias)
        self.q_a_layernorm = RMSNorm(config.q_rank, LATENT_EPS) if config.q_rank else None
        self.q_b_proj = Linear(config.q_rank, H * (N + R), bias=False) if config.q_rank else None
        self.kv_a_layernorm = RMSNorm(C, LATENT_EPS)
        self.kv_b_HXC = nn.Parameter(torch.empty(H, N + V, C))
        self.o_proj = Linear(H * V, config.hidden_size, bias=config.o_bias)

    def forward(self, x_TH: Tensor, rotation: Rotation, attn: HasLatent, layer: int, rows_R: Tensor | None = None) -> Tensor:
        q, latent_TL = self.in_proj(x_TH).split(self.splits, dim=-1)
        if self.q_b_proj is not None:
            assert self.q_a_layernorm is not None
            q = self.q_b_proj(self.q_a_layernorm(q))
        prep = LatentPrep(rotation, self.kv_a_layernorm.weight, self.kv_a_layernorm.eps)
        q_THQ = q.unflatten(-1, (-1, self.query_dim))
        out_THV = attn.latent()(layer, q_THQ, latent_TL, self.kv_b_HXC, prep, rows_R, self.scoring)
        return self.o_proj(out_THV.flatten(1))


class DeepseekLayer(DecoderLayer):
    """Pre-norm transformer block with latent attention, and experts from some layer on."""

    def __init__(self, config: DeepseekConfig, index: int) -> None:
        nn.Module.__init__(self)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.add_module("self_attn", LatentAttention(config))
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        dense = config.experts is None or index < config.first_dense
        self.add_module("mlp", MLP(config) if dense else MixtureOfExperts(config, config.experts))


class DeepseekLM(CausalLM):
    """A DeepSeek V2 or V3.  max_positions: the rotary table's length, look-ahead included."""

    config: DeepseekConfig

    def make_layer(self, config: ModelConfig, index: int) -> DecoderLayer:
        assert isinstance(config, DeepseekConfig)
        return DeepseekLayer(config, index)
