"""Targets of the DeepSeek V2 and V3 families: multi-head latent attention (MLA), dense layers and mixtures of experts.

Section 2.1 of DeepSeek-V2's paper (arXiv 2405.04434) describes MLA.  The forward pass is CausalLM's; only the layers differ.
A layer hands its pass's attention latents (attention/latent/mla.py, where it is decided whether the latents of a token are
expanded to keys and values, or queries are brought down to the latents).  This file knows no phase of a
round, no page and no tree.

Shapes: T tokens, H heads, C latent rank, R rotated part of a head (the config calls it head_dim), N part of a head that is not
rotated, V value dimension, L = C + R, Q = N + R, X = N + V.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdec.attention.inputs import AttentionFn
from specdec.attention.kinds import Scoring
from specdec.attention.latent.mla import LatentInputs
from specdec.attention.latent.prep import LatentPrep
from specdec.models.causal_lm import CausalLM, PreNormLayer
from specdec.models.config import ModelConfig
from specdec.models.deepseek.config import DeepseekConfig
from specdec.models.experts import MixtureOfExperts
from specdec.models.layers import MLP, Linear, RMSNorm
from specdec.ops.rope import Rotation

LATENT_EPS = 1e-6  # eps of the two norms inside of attention; DeepSeek's code fixes it, and rms_norm_eps is for the other norms


class LatentAttention(nn.Module):
    """Multi-head latent attention of one layer: input projection, attention over latents, output projection.

    in_proj yields each token's latent (C values, then R values of a rotary key that all heads share) and, before it, either the
    queries of all heads or, where the config has q_rank, a short vector that q_b_proj turns into them.
    kv_b_HXC: the weights that expand a latent to each head's keys (first N rows) and values (last V rows).
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

    def forward(self, x_TH: Tensor, rotation: Rotation, attn: AttentionFn, layer: int, rows_R: Tensor | None = None) -> Tensor:
        """From x [T, hidden size] to a tensor of the same width, for all T tokens or for rows_R only."""
        q, latent_TL = self.in_proj(x_TH).split(self.splits, dim=-1)
        if self.q_b_proj is not None:
            assert self.q_a_layernorm is not None
            q = self.q_b_proj(self.q_a_layernorm(q))
        prep = LatentPrep(rotation, self.kv_a_layernorm.weight, self.kv_a_layernorm.eps)
        q_THQ = q.unflatten(-1, (-1, self.query_dim))
        out_THV = attn(layer, LatentInputs(q_THQ, latent_TL, self.kv_b_HXC, prep), rows_R, self.scoring)
        return self.o_proj(out_THV.flatten(1))


class DeepseekLayer(PreNormLayer):
    """A decoder layer with latent attention.  Its MLP is dense in the first config.first_dense layers, else a mixture."""

    def __init__(self, config: DeepseekConfig, index: int) -> None:
        dense = config.experts is None or index < config.first_dense
        mlp = MLP(config) if dense else MixtureOfExperts(config, config.experts)
        super().__init__(config, LatentAttention(config), mlp)


class DeepseekLM(CausalLM):
    """A DeepSeek V2 or V3 model.  max_positions: as of CausalLM."""

    config: DeepseekConfig

    def make_layer(self, config: ModelConfig, index: int) -> PreNormLayer:
        assert isinstance(config, DeepseekConfig)
        return DeepseekLayer(config, index)
