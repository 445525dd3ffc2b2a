"""Layers of the DiffLlama family: those of a Llama which subtract one softmax from another (arXiv 2410.05258).

Only a layer's attention differs from a Llama's.  Checkpoints hold all first heads of the pairs before all
second ones; here the two key heads of a pair are neighbours, and so are their value heads and their groups of query heads.
With that order a pair's keys, and its values, are one head of twice the width as they lie in an ordinary cache.

Shapes: T tokens, K key heads, D head dim.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from specdec.attention.differential.inputs import DifferentialInputs, DifferentialQueries
from specdec.attention.differential.subtract import Difference
from specdec.attention.inputs import AttentionFn, LayerInputs
from specdec.attention.kinds import Scoring
from specdec.models.causal_lm import PreNormLayer
from specdec.models.config import ModelConfig
from specdec.models.diffllama.config import lambda_init
from specdec.models.keys.slopes import Slopes, slopes_of_bloom
from specdec.models.layers import MLP, projection
from specdec.models.linear import Linear
from specdec.models.making import made_now
from specdec.ops.rope import HeadPrep, Rotation


class DifferentialAttention(nn.Module):
    """Differential attention of one layer: one projection to queries, keys and values, attention, output projection.

    A layer that reads the keys and values of an earlier layer projects queries only.
    num_kv_heads: K, of the layer whose keys and values it reads.  all_kv_heads: of all ranks.
    factor: float32 without dims, the layer's lambda.  The loader computes it from the checkpoint's four vectors.
    norm_weight: float32, of the norm of the difference; None unless the checkpoint has one (`subln`).
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.all_kv_heads = config.num_kv_heads * config.shard.size // config.kv_copies
        self.shares_kv = config.kv_source[layer] != layer
        self.qkv_proj = projection(config, config.hidden_size, 0 if self.shares_kv else self.num_kv_heads)
        self.o_proj = Linear.row(self.num_heads * self.head_dim, config.hidden_size, config.shard, config.o_bias)
        self.factor = nn.Buffer(torch.zeros((), dtype=torch.float32, device=made_now().device))
        self.scoring = Scoring(softcap=config.softcap)
        self.sqrt_alibi, self.slopes = config.sqrt_alibi, None
        if config.layer_kinds[layer].alibi:
            slopes = pair_slopes(self.num_heads * config.shard.size, self.all_kv_heads)
            self.slopes = Slopes(slopes[config.shard.piece(len(slopes))])
        self.norm_weight: Tensor | None = None
        self.lambda_init = lambda_init(layer)
        self.scale, self.eps = 1 - self.lambda_init, config.rms_norm_eps

    def forward(self, x_TH: Tensor, rotation: Rotation, attn: AttentionFn, layer: int, rows_R: Tensor | None = None) -> Tensor:
        """From x [T, hidden size] to a tensor of the same width, for all T tokens or for rows_R only."""
        qkv_TXD = self.qkv_proj(x_TH).unflatten(-1, (-1, self.head_dim))
        difference = Difference(self.factor, self.scale, self.eps, self.norm_weight)
        scoring, turned = self.scoring, rotation if self.slopes is None else None
        if self.slopes is not None:
            scoring = replace(scoring, slopes_H=self.slopes.on(x_TH.device), sqrt_alibi=self.sqrt_alibi)
        inputs: LayerInputs
        if self.shares_kv:
            inputs = DifferentialQueries(qkv_TXD, HeadPrep(turned, 0), difference, self.num_kv_heads)
        else:
            inputs = DifferentialInputs(qkv_TXD, HeadPrep(turned, self.num_kv_heads), difference)
        return self.o_proj(attn(layer, inputs, rows_R, scoring).flatten(1))


def pair_slopes(num_heads: int, num_kv_heads: int) -> tuple[float, ...]:
    """ALiBi's slope of each query head, in our order: BLOOM's of H / 2 heads, each for both softmaxes of a pair."""
    slopes, group = slopes_of_bloom(num_heads // 2), num_heads // num_kv_heads
    pairs = [slopes[start : start + group] for start in range(0, num_heads // 2, group)]
    return tuple(slope for pair in pairs for slope in (*pair, *pair))


def diffllama_layer(config: ModelConfig, index: int) -> PreNormLayer:
    """A decoder layer with differential attention."""
    return PreNormLayer(config, DifferentialAttention(config, index), MLP(config))
