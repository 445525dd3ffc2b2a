"""Layers of Qwen's hybrids: the gated delta net, and attention whose output a gate multiplies.

Both hand the pass what they have made of its tokens, and multiply what comes back with a gate of the same tokens.  Which
sequence a token belongs to, and what is kept of it, neither knows.

Shapes: T tokens, R rows asked for, H hidden size, Q query heads, K key/value heads, D head dimension; of the delta rule G key
heads and V value heads of E values, C channels of its convolution (queries and keys of G heads, values of V), Z taps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdec.attention.inputs import AttentionFn, HeadInputs
from specdec.models.causal_lm import PreNormLayer
from specdec.models.config import ModelConfig
from specdec.models.layers import SelfAttention
from specdec.models.linear import Linear
from specdec.models.making import made_now, new_weight
from specdec.models.mixtures.layer import mlp_of
from specdec.models.qwen_hybrid.config import NEXT
from specdec.models.recurrent.inputs import RuleLayerInputs
from specdec.ops.products.partials import Partials
from specdec.ops.recurrent.conv import Convolution
from specdec.ops.recurrent.gated_delta import GATED_DELTA, Gates
from specdec.ops.recurrent.gates.gated_norm import gated_norm
from specdec.ops.recurrent.gates.output_gate import gated_output
from specdec.ops.rope import HeadPrep, Rotation
from specdec.ops.rows import select_rows

ROWS = 8  # of a matrix: a multiple of so many is what the kernels of few tokens take (ops/products/tiles/dense.py)


class GatedAttention(SelfAttention):
    """SelfAttention whose output is multiplied by the sigmoid of a gate of its own width, before the output projection.

    The projection yields gates of all heads, and then queries, keys and values; the part q_proj holds both of the former, as a
    checkpoint's matrix does (there a head's queries and its gates alternate).
    """

    query_rows = 2

    def forward(
        self, x_TH: Tensor, rotation: Rotation, attn: AttentionFn, layer: int, rows_R: Tensor | None = None
    ) -> Tensor | Partials:
        """From x [T, H] to [T, H], or to [R, H] with rows_R.  The caller adds the result to the residual stream."""
        assert self.qk_norm is not None and not self.shares_kv
        gate_TQD, qkv_TXD = self.project(x_TH).tensor_split((self.num_heads,), dim=1)
        prep = HeadPrep(rotation, self.num_kv_heads, self.qk_norm.weight, self.qk_norm.eps)
        out_RQD = attn(layer, HeadInputs(qkv_TXD, prep), rows_R, self.scoring)
        return self.o_proj(gated_output(out_RQD, gate_TQD, rows_R), partials=True)


class GatedDeltaNet(nn.Module):
    """The gated delta rule as a layer: projections, the rule with its convolution, a gated norm, the output projection.

    in_proj: queries, keys, values, and the gates z of the outputs.  gates_proj: of each value head b, its strengths, then a,
    its decays.  conv_ZC: in the model's dtype.  A_log_V, dt_bias_V: float32 in a model of any dtype.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        own, H = config.recurrent, config.hidden_size
        assert own is not None and own.rule is not None
        self.sizes, self.shard, self.eps, device = own.rule, config.shard, config.rms_norm_eps, made_now().device
        V, outputs = own.rule.value_heads, own.outputs
        wide, gates = {"in_proj_qkv": own.channels, "in_proj_z": outputs}, {"in_proj_b": V, "in_proj_a": V}
        if config.family == NEXT:
            wide, gates = {"in_proj_qkvz": own.channels + outputs}, {"in_proj_ba": 2 * V}
        in_one = config.quantization is None and (own.channels + outputs + 2 * V) % ROWS == 0
        self.in_proj = Linear.column(H, wide | gates if in_one else wide, config.shard)
        self.gates_proj = None if in_one else Linear.column(H, gates, config.shard)
        self.out_proj = Linear.row(outputs, H, config.shard)
        self.conv_ZC = new_weight(own.taps, own.channels)
        self.norm_E = new_weight(own.rule.value_width)
        self.A_log_V, self.dt_bias_V = (nn.Buffer(torch.empty(V, dtype=torch.float32, device=device)) for _ in range(2))

    def forward(
        self, x_TH: Tensor, rotation: Rotation, attn: AttentionFn, layer: int, rows_R: Tensor | None = None
    ) -> Tensor | Partials:
        """As of GatedAttention.  Nothing turns with positions."""
        V, E, C = self.sizes.value_heads, self.sizes.value_width, self.conv_ZC.shape[1]
        x_TC, z_TY, gates_TW = self.in_proj(x_TH).tensor_split((C, C + V * E), dim=1)
        b_TV, a_TV = (gates_TW if self.gates_proj is None else self.gates_proj(x_TH)).chunk(2, dim=1)
        gates = Gates(a_TV, b_TV, self.A_log_V, self.dt_bias_V)
        out_RVE = attn(layer, RuleLayerInputs(x_TC, Convolution(self.conv_ZC), GATED_DELTA, gates, self.sizes), rows_R)
        z_RY = z_TY if rows_R is None else select_rows(z_TY, rows_R)
        normed_RVE = gated_norm(out_RVE, z_RY.unflatten(1, (V, E)), self.norm_E, self.eps)
        return self.out_proj(normed_RVE.flatten(1), partials=True)


def hybrid_layer(config: ModelConfig, index: int) -> PreNormLayer:
    """The layer of that number in a target, or in its MTP layers."""
    is_recurrent = config.layer_kinds[index].recurrent
    attention = GatedDeltaNet(config) if is_recurrent else GatedAttention(config, config.hidden_size)
    return PreNormLayer(config, attention, mlp_of(config, index))
