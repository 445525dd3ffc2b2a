"""Multi-head latent attention (MLA), and decoder layers of it: dense ones and mixtures of experts.

Section 2.1 of DeepSeek-V2's paper (arXiv 2405.04434) describes MLA.  The model around them is CausalLM.
A layer hands its pass's attention latents (attention/latent/mla.py, where it is decided whether the latents of a token are
expanded to keys and values, or queries are brought down to the latents).  This file knows no phase of a round, no page and no
tree.

Layers of DeepSeek V3.2 and GLM-5 have an indexer as well, which chooses the keys that a query reads (attention/sparse/).  In
GLM-5.2 most layers have none, and read what an earlier layer's indexer chose.

Shapes: T tokens, H heads, C latent rank, R rotated part of a head (the config calls it head_dim), N part of a head that is not
rotated, V value dimension, L = C + R, Q = N + R, X = N + V, J heads of the indexer, I dimensions of its heads.
"""

from __future__ import annotations

from torch import Tensor, nn

from specdec.attention.inputs import AttentionFn
from specdec.attention.kinds import Scoring
from specdec.attention.latent.limits import LIMITS
from specdec.attention.latent.mla import LatentInputs
from specdec.attention.latent.prep import LatentPrep
from specdec.attention.sparse.index_store import IndexPrep
from specdec.attention.sparse.inputs import IndexInputs, SparseLatentInputs
from specdec.models.causal_lm import PreNormLayer
from specdec.models.latent.config import LATENT_EPS, LatentConfig
from specdec.models.layers import RMSNorm
from specdec.models.linear import ONLY, Linear
from specdec.models.making import new_weight
from specdec.models.mixtures.layer import mlp_of
from specdec.ops.rope import Rotation


class IndexNorm(nn.Module):
    """Weight and bias of the LayerNorm of an indexer's keys.  The norm itself runs inside of attention."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = new_weight(size), new_weight(size)


class LatentAttention(nn.Module):
    """Multi-head latent attention of one layer: input projection, attention over latents, output projection.

    in_proj yields each token's latent (C values, then R values of a rotary key that all heads share) and, before it, either the
    queries of all heads or, where the config has q_rank, a short vector that q_b_proj turns into them.  If the layer has an
    indexer, in_proj also yields, after the latent, the indexer's key and the weights of its heads, and q_b_proj, after the
    heads' queries, the indexer's queries.
    weights_proj yields these weights in a quantised model, whose checkpoint may store them unlike the rest (config.py).
    kv_b_proj: expands a latent to each head's keys (first N rows of a head) and values (last V rows).
    config: this rank's share of the model's.  in_features: width of the input; None: the hidden size.
    limits: from which sizes of a pass on it is computed in another form.
    """

    def __init__(self, config: LatentConfig, layer: int, in_features: int | None = None) -> None:
        super().__init__()
        H, C, R, N, V = config.num_heads, config.latent_rank, config.head_dim, config.nope_dim, config.value_dim
        self.config, self.scoring, self.limits = config, Scoring(scale=config.scale), LIMITS
        self.query_dim, self.queries, self.sparse = N + R, H * (N + R), config.indexer
        own = config.indexer if config.indexer is not None and config.indexer.has_own(layer) else None
        J, I = (own.heads, own.head_dim) if own else (0, 0)
        apart = J if config.quantization is not None else 0
        parts = {"q": config.q_rank or self.queries, "latent": C + R, "index_key": I, "index_weights": J - apart}
        shard, whole = config.shard, config.shard.size  # latents, and the indexer's choice, are the same on all ranks
        copies = dict.fromkeys(parts, whole) | ({} if config.q_rank else {"q": 1})
        self.in_proj = Linear.column(in_features or config.hidden_size, parts, shard, config.qkv_bias, copies)
        self.weights_proj = Linear.column(config.hidden_size, {ONLY: J}, shard, False, {ONLY: whole}) if apart else None
        self.q_a_layernorm = RMSNorm(config.q_rank, config.latent_eps) if config.q_rank else None
        own_queries = {"q": self.queries, "index_q": J * I}
        self.q_b_proj = Linear.column(config.q_rank, own_queries, shard, False, {"index_q": whole}) if config.q_rank else None
        self.k_norm = IndexNorm(I) if own else None
        self.kv_a_layernorm = RMSNorm(C, config.latent_eps)
        self.kv_b_proj = Linear.column(C, {ONLY: H * (N + V)}, shard)
        self.kv_b_proj.may_be_lossless = False  # read by head
        self.num_heads = H
        self.o_proj = Linear.row(H * V, config.hidden_size, shard, config.o_bias)

    def forward(self, x_TH: Tensor, rotation: Rotation, attn: AttentionFn, layer: int, rows_R: Tensor | None = None) -> Tensor:
        """From x [T, hidden size] to a tensor of the same width, for all T tokens or for rows_R only."""
        q, latent_TL, key_TI, weights_TJ = self.in_proj(x_TH).split(list(self.in_proj.parts.sizes.values()), dim=-1)
        if self.q_b_proj is not None:
            assert self.q_a_layernorm is not None
            q = self.q_b_proj(self.q_a_layernorm(q))
        prep = LatentPrep(rotation, self.kv_a_layernorm.weight, self.kv_a_layernorm.eps)
        q_THQ = q[:, : self.queries].unflatten(-1, (-1, self.query_dim))
        up_HXC, numerics = self.kv_b_proj.by_head(self.num_heads), self.kv_b_proj.numerics
        latents = LatentInputs(q_THQ, latent_TL, up_HXC, prep, numerics, self.limits)
        if self.sparse is None:
            return self.o_proj(attn(layer, latents, rows_R, self.scoring).flatten(1))
        index = None
        if self.k_norm is not None:
            q_TJI = q[:, self.queries :].unflatten(-1, (-1, self.sparse.head_dim))
            weights_TJ = weights_TJ if self.weights_proj is None else self.weights_proj(x_TH)
            norm, bias, scale = self.k_norm.weight, self.k_norm.bias, self.sparse.heads**-0.5
            index = IndexInputs(q_TJI, key_TI, weights_TJ, IndexPrep(rotation, norm, bias, LATENT_EPS, scale))
        inputs = SparseLatentInputs(latents, self.sparse.topk, index)
        return self.o_proj(attn(layer, inputs, rows_R, self.scoring).flatten(1))


class LatentLayer(PreNormLayer):
    """A decoder layer with latent attention."""

    def __init__(self, config: LatentConfig, index: int) -> None:
        super().__init__(config, LatentAttention(config, index), mlp_of(config, index))
