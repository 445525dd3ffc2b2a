"""Gemma 4's text model: norms before and after each block, normed values, inputs by layer, and a mixture beside the MLP.

Shapes: T tokens, R rows asked for, H hidden size, V vocabulary, L layers, P size of a layer's input, Q query heads, K key/value
heads, X = Q + 2K, D head dimension, E experts, K (of experts) experts of a token.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.attention.inputs import AttentionFn
from specdec.models.causal_lm import CausalLM, MakeLayer, PreNormLayer
from specdec.models.gemma4.config import GemmaConfig
from specdec.models.layers import MLP, Embedding, NoNorm, RMSNorm, SelfAttention
from specdec.models.linear import Linear
from specdec.models.making import made_now
from specdec.models.mixtures.layer import MixtureOfExperts
from specdec.models.mixtures.router import Router
from specdec.models.mixtures.rules import ExpertsConfig
from specdec.ops.products.experts import GeGLU
from specdec.ops.products.own_pairs import Kept, own_pairs
from specdec.ops.products.partials import NormedProduct, Partials, added_up
from specdec.ops.rope import PLAIN_VALUES, Rotation, ValuePrep
from specdec.ops.rows import select_rows


class GemmaAttention(SelfAttention):
    """SelfAttention whose values are normed without a weight; in some layers they are the keys' projection.

    config: that of the layer.
    """

    def __init__(self, config: GemmaConfig, shares_kv: bool) -> None:
        super().__init__(config, config.hidden_size, shares_kv)
        self.values = PLAIN_VALUES if shares_kv else ValuePrep(normed=True, are_keys=config.values_are_keys)


class GeluMLP(MLP):
    """An MLP whose gates pass GELU.  width: of this rank's share."""

    def __init__(self, config: GemmaConfig, width: int) -> None:
        super().__init__(replace(config, intermediate_size=width))
        self.gate = GeGLU()

    def forward(self, x: Tensor, partials: bool = False) -> Tensor | Partials:
        return self.down_proj(self.gate(self.gate_up_proj(x)), partials=partials)


class ScaledRouter(Router):
    """A router whose weights are multiplied with a number of each expert, after they were divided by their sum.

    scale_E: float32.
    """

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__(hidden_size, config)
        self.scale_E = nn.Buffer(torch.empty(config.count, dtype=torch.float32, device=made_now().device))

    def forward(self, x_TH: Tensor, kept: Kept | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
        """As of Router."""
        weights_TK, ids_TK, shared = super().forward(x_TH)
        weights_TK = weights_TK * self.scale_E[ids_TK]
        return *((weights_TK, ids_TK) if kept is None else own_pairs(weights_TK, ids_TK, *kept)), shared

    def unchosen(self, x_1H: Tensor, kept: Kept | None = None) -> None:
        """Nothing: the kernels of experts know no scale."""


class GemmaMixture(MixtureOfExperts):
    """The mixture beside a layer's MLP, which `ExpertsConfig.shared_size` counts, and which stands in the layer."""

    def __init__(self, config: GemmaConfig) -> None:
        assert config.experts is not None
        experts = replace(config.experts, shared_size=0)
        super().__init__(config, experts)
        self.router = ScaledRouter(config.hidden_size, experts)


class LayerScale(nn.Module):
    """The number with which a layer's output is multiplied.  weight: [1]."""

    def __init__(self) -> None:
        super().__init__()
        now = made_now()
        self.weight = nn.Buffer(torch.empty(1, dtype=now.dtype, device=now.device))


class LayerInput(nn.Module):
    """What a layer makes of its own input of a token: gate, product, projection and norm."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        H, P = config.hidden_size, config.input_size
        self.per_layer_input_gate, self.per_layer_projection = Linear(H, P), Linear(P, H)
        self.post_per_layer_input_norm = RMSNorm(H, config.rms_norm_eps)

    def forward(self, x_TH: Tensor, own_TP: Tensor) -> Tensor | Partials:
        """What the norm after it reads."""
        gate_TP = F.gelu(cast(Tensor, self.per_layer_input_gate(x_TH)), approximate="tanh")
        return cast(Tensor | Partials, self.per_layer_projection(gate_TP * own_TP, partials=True))


class GemmaLayer(PreNormLayer):
    """A block with norms on both sides of attention and MLP.

    experts: the mixture, if any; its norms are those whose names end in a number.  layer_input: None where layers have none.
    shares_kv: as of SelfAttention.
    """

    def __init__(self, config: GemmaConfig, index: int, shares_kv: bool) -> None:
        own = cast(GemmaConfig, config.with_heads_of(index))
        attention = GemmaAttention(own, shares_kv)
        super().__init__(config, attention, GeluMLP(config, config.mlp_width(index)))
        H, self.eps = config.hidden_size, config.rms_norm_eps
        self.pre_feedforward_layernorm, self.post_feedforward_layernorm = RMSNorm(H, self.eps), RMSNorm(H, self.eps)
        self.layer_scalar = LayerScale()
        self.layer_input = LayerInput(config) if config.input_size else None
        self.experts: GemmaMixture | None = None
        if config.experts is not None:
            self.experts = GemmaMixture(config)
            self.post_feedforward_layernorm_1, self.post_feedforward_layernorm_2 = RMSNorm(H, self.eps), RMSNorm(H, self.eps)
            self.pre_feedforward_layernorm_2 = RMSNorm(H, self.eps)

    def forward(
        self,
        x_TH: Tensor,
        normed_TH: Tensor,
        rotation: Rotation,
        attn: AttentionFn,
        layer: int,
        rows_R: Tensor | None = None,
        own_TP: Tensor | None = None,
    ) -> tuple[Tensor, NormedProduct]:
        """As of PreNormLayer.  own_TP: the layer's own inputs, of all tokens."""
        attended = self.self_attn(normed_TH, rotation, attn, layer, rows_R)
        x = x_TH if rows_R is None else select_rows(x_TH, rows_R)
        x, normed = self.pre_feedforward_layernorm.add(x, self.post_attention_layernorm.before_adding(attended))
        out, is_whole = self._fed_forward(x, normed)
        scale, after, own = self.layer_scalar.weight, self.post_feedforward_layernorm, self.layer_input
        if own is None:
            return x, after.before_adding(out, scale, is_whole=is_whole)
        assert own_TP is not None
        x = after.add_normed(x, out, is_whole=is_whole)
        made = own(x, own_TP if rows_R is None else select_rows(own_TP, rows_R))
        return x, own.post_per_layer_input_norm.before_adding(made, scale, is_whole=True)

    def _fed_forward(self, x_TH: Tensor, normed_TH: Tensor) -> tuple[Tensor | Partials, bool]:
        """(the output of the MLP, or of it and the mixture; whether it is the sum of all ranks' already)."""
        out = self.mlp(normed_TH, partials=True)
        if self.experts is None:
            return out, False
        routed_TH = F.rms_norm(x_TH, x_TH.shape[-1:], None, self.eps)
        mixed = self.experts(self.pre_feedforward_layernorm_2(x_TH), partials=True, routed_TH=routed_TH)
        of_mlp = self.post_feedforward_layernorm_1
        of_mlp_TH = of_mlp(of_mlp.group.all_reduce(added_up(out)))
        return self.post_feedforward_layernorm_2.add_normed(of_mlp_TH, mixed), True


class GemmaLM(CausalLM):
    """The model around the layers: scaled embeddings, inputs by layer, capped logits."""

    config: GemmaConfig

    def __init__(self, config: GemmaConfig, max_positions: int, make_layer: MakeLayer) -> None:
        super().__init__(config, max_positions, make_layer)
        size = config.num_layers * config.input_size
        self.embed_tokens_per_layer = Embedding(config.vocab_size, size) if size else None
        self.per_layer_model_projection = Linear(config.hidden_size, size) if size else None
        self.per_layer_projection_norm = RMSNorm(config.input_size, config.rms_norm_eps) if size else None

    def layer_inputs(self, ids_T: Tensor, x_TH: Tensor) -> Tensor | None:
        table, projection, norm = self.embed_tokens_per_layer, self.per_layer_model_projection, self.per_layer_projection_norm
        if table is None or projection is None or norm is None:
            return None
        size, H = (-1, self.config.input_size), self.config.hidden_size
        of_ids_TLP = (F.embedding(ids_T, table.weight) * rounded(size[1] ** 0.5, x_TH.dtype)).unflatten(1, size)
        of_x_TLP: Tensor = norm((cast(Tensor, projection(x_TH)) * H**-0.5).unflatten(1, size).contiguous())
        return (of_x_TLP + of_ids_TLP) * 2.0**-0.5

    def logits(self, hidden: Tensor) -> Tensor:
        logits, cap = super().logits(hidden), self.config.final_softcap
        return logits if cap is None else (logits / cap).tanh() * cap

    def _embed(self, ids_T: Tensor, norm: RMSNorm | NoNorm) -> tuple[Tensor, Tensor]:
        table = self.embed_tokens.weight
        x_TH = F.embedding(ids_T, table) * rounded(self.config.embedding_multiplier, table.dtype)
        return x_TH, norm(x_TH)


def rounded(factor: float, dtype: torch.dtype) -> float:
    """The number that the dtype has for it: Gemma multiplies embeddings with that."""
    mantissa, exponent = math.frexp(factor)
    steps = 2 / torch.finfo(dtype).eps  # between 0 and 1, as far apart as numbers from a half to one are
    return math.ldexp(round(mantissa * steps) / steps, exponent)


def gemma_layer(config: GemmaConfig, index: int) -> GemmaLayer:
    """The layer of that number."""
    return GemmaLayer(config, index, config.kv_source[index] != index)
