"""The layers of OLMo Hybrid: the gated delta net after a norm, and attention before one.

Shapes: T tokens, R rows asked for, H hidden size; of the delta rule V value heads of E values, C channels of its convolution
(queries and keys of all key heads, values of V), Z taps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdec.attention.inputs import AttentionFn
from specdec.models.causal_lm import PreNormLayer
from specdec.models.layers import MLP, NoNorm, RMSNorm
from specdec.models.linear import Linear
from specdec.models.making import made_now, new_weight
from specdec.models.mixtures.wide_norms import WideNormAttention
from specdec.models.olmo_hybrid.config import OlmoHybridConfig
from specdec.models.recurrent.inputs import RuleLayerInputs
from specdec.ops.products.partials import Partials, added_up
from specdec.ops.recurrent.conv import Convolution
from specdec.ops.recurrent.gated_delta import GATED_DELTA, Gates
from specdec.ops.recurrent.gates.gated_norm import gated_norm
from specdec.ops.rope import Rotation
from specdec.ops.rows import select_rows

GATED_EPS = 1e-5  # of the gated norm; rms_norm_eps is for the other norms
ROWS = 8  # of a matrix: a multiple of so many is what the kernels of few tokens take (ops/products/tiles/dense.py)


class SeparateDeltaNet(nn.Module):
    """The gated delta rule as a layer, whose projections are a matrix each in checkpoints.

    in_proj: queries, keys, values, and the gates of the outputs.  gates_proj: of each value head its strength, then its decay.
    conv_ZC: in the model's dtype.  A_log_V, dt_bias_V: float32 in a model of any dtype.
    """

    def __init__(self, config: OlmoHybridConfig) -> None:
        super().__init__()
        own, H = config.recurrent, config.hidden_size
        assert own is not None and own.rule is not None
        self.sizes, self.shard, self.strongest, device = own.rule, config.shard, config.strongest, made_now().device
        V, (keys, _, values) = own.rule.value_heads, own.rule.kinds
        wide = {"q_proj": keys, "k_proj": keys, "v_proj": values, "g_proj": values}
        gates = {"b_proj": V, "a_proj": V}
        in_one = config.quantization is None and (own.channels + values + 2 * V) % ROWS == 0
        self.in_proj = Linear.column(H, wide | gates if in_one else wide, config.shard)
        self.gates_proj = None if in_one else Linear.column(H, gates, config.shard)
        self.out_proj = Linear.row(values, H, config.shard)
        self.conv_ZC = new_weight(own.taps, own.channels)
        self.norm_E = new_weight(own.rule.value_width)
        self.A_log_V, self.dt_bias_V = (nn.Buffer(torch.empty(V, dtype=torch.float32, device=device)) for _ in range(2))

    def forward(
        self, x_TH: Tensor, rotation: Rotation, attn: AttentionFn, layer: int, rows_R: Tensor | None = None
    ) -> Tensor | Partials:
        """As of SelfAttention.  Nothing turns with positions."""
        V, E, C = self.sizes.value_heads, self.sizes.value_width, self.conv_ZC.shape[1]
        x_TC, z_TY, gates_TW = self.in_proj(x_TH).tensor_split((C, C + V * E), dim=1)
        b_TV, a_TV = (gates_TW if self.gates_proj is None else self.gates_proj(x_TH)).chunk(2, dim=1)
        gates = Gates(a_TV, b_TV, self.A_log_V, self.dt_bias_V, self.strongest)
        out_RVE = attn(layer, RuleLayerInputs(x_TC, Convolution(self.conv_ZC), GATED_DELTA, gates, self.sizes), rows_R)
        z_RY = z_TY if rows_R is None else select_rows(z_TY, rows_R)
        normed_RVE = gated_norm(out_RVE, z_RY.unflatten(1, (V, E)), self.norm_E, GATED_EPS)
        return self.out_proj(normed_RVE.flatten(1), partials=True)


class PostNormLayer(PreNormLayer):
    """A block whose attention and MLP read the residual stream as it is, and are normed before they are added to it."""

    norm_follows = False

    def __init__(self, config: OlmoHybridConfig) -> None:
        super().__init__(config, WideNormAttention(config), MLP(config))
        self.input_layernorm = NoNorm()
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x_TH: Tensor, normed_TH: Tensor, rotation: Rotation, attn: AttentionFn, layer: int, rows_R: Tensor | None = None
    ) -> tuple[Tensor, Tensor | Partials]:
        """As of PreNormLayer; nothing is left to be added."""
        attended = self.self_attn(normed_TH, rotation, attn, layer, rows_R)
        x = x_TH if rows_R is None else select_rows(x_TH, rows_R)
        x = x + self._normed(self.post_attention_layernorm, attended)
        return x + self._normed(self.post_feedforward_layernorm, self.mlp(x)), torch.zeros_like(x)

    @staticmethod
    def _normed(norm: RMSNorm, output: Tensor | Partials) -> Tensor:
        """Of the sum over ranks and splits."""
        normed: Tensor = norm(norm.group.all_reduce(added_up(output)))
        return normed


def olmo_hybrid_layer(config: OlmoHybridConfig, index: int) -> PreNormLayer:
    """The layer of that number."""
    if config.layer_kinds[index].recurrent:
        return PreNormLayer(config, SeparateDeltaNet(config), MLP(config))
    return PostNormLayer(config)
