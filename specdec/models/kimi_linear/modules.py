"""The layers of Kimi Linear: Kimi's delta rule as a layer, or latent attention (latent/attention.py), before a mixture.

Shapes: T tokens, R rows asked for; of the delta rule H heads of E numbers, C = H E channels of each of queries, keys and
values, Z taps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdec.attention.inputs import AttentionFn
from specdec.models.causal_lm import PreNormLayer
from specdec.models.latent.attention import LatentAttention
from specdec.models.latent.config import LatentConfig
from specdec.models.linear import Linear
from specdec.models.making import made_now, new_weight
from specdec.models.mixtures.layer import mlp_of
from specdec.models.recurrent.inputs import RuleLayerInputs
from specdec.ops.products.partials import Partials
from specdec.ops.recurrent.conv import Convolution
from specdec.ops.recurrent.gates.gated_norm import KIMI, gated_norm
from specdec.ops.recurrent.kimi_delta import KIMI_DELTA, KimiGates
from specdec.ops.rope import Rotation
from specdec.ops.rows import select_rows

ROWS = 8  # of a matrix: a multiple of so many is what the kernels of few tokens take (ops/products/tiles/dense.py)


class KimiDeltaAttention(nn.Module):
    """Kimi's delta rule as a layer: projections, the rule with its convolution, a gated norm, the output projection.

    in_proj: queries, keys, values, and the short vector of which g_b_proj makes the outputs' gates.  gates_proj: of each head
    its strength, and the short vector of which f_b_proj makes the decays.  Short vectors are the same on all ranks.
    conv_ZC: in the model's dtype.  A_log_H, dt_bias_C: float32 in a model of any dtype.
    """

    def __init__(self, config: LatentConfig) -> None:
        super().__init__()
        own, hidden, shard = config.recurrent, config.hidden_size, config.shard
        assert own is not None and own.rule is not None
        H, E, C, device = own.rule.value_heads, own.rule.value_width, own.outputs, made_now().device
        self.sizes, self.shard, self.eps = own.rule, shard, config.rms_norm_eps
        wide, gates = {"q_proj": C, "k_proj": C, "v_proj": C, "g_a_proj": E}, {"b_proj": H, "f_a_proj": E}
        in_one = config.quantization is None and (3 * C + 2 * E + H) % ROWS == 0
        copies = {"g_a_proj": shard.size, "f_a_proj": shard.size}
        self.in_proj = Linear.column(hidden, wide | gates if in_one else wide, shard, copies=copies)
        self.gates_proj = None if in_one else Linear.column(hidden, gates, shard, copies=copies)
        self.f_b_proj = Linear.column(E, {"f_b_proj": C}, shard)
        self.g_b_proj = Linear.column(E, {"g_b_proj": C}, shard)
        self.o_proj = Linear.row(C, hidden, shard)
        self.conv_ZC = new_weight(own.taps, own.channels)
        self.norm_E = new_weight(E)
        self.A_log_H, self.dt_bias_C = (nn.Buffer(torch.empty(n, dtype=torch.float32, device=device)) for n in (H, C))

    def forward(
        self, x_TH: Tensor, rotation: Rotation, attn: AttentionFn, layer: int, rows_R: Tensor | None = None
    ) -> Tensor | Partials:
        """As of SelfAttention.  Nothing turns with positions."""
        H, E, channels = self.sizes.value_heads, self.sizes.value_width, self.conv_ZC.shape[1]
        x_TX, short_TE, gates_TW = self.in_proj(x_TH).tensor_split((channels, channels + E), dim=1)
        b_TH, a_TE = (gates_TW if self.gates_proj is None else self.gates_proj(x_TH)).tensor_split((H,), dim=1)
        gates = KimiGates(self.f_b_proj(a_TE), b_TH, self.A_log_H, self.dt_bias_C)
        out_RHE = attn(layer, RuleLayerInputs(x_TX, Convolution(self.conv_ZC), KIMI_DELTA, gates, self.sizes), rows_R)
        z_RC = self.g_b_proj(short_TE if rows_R is None else select_rows(short_TE, rows_R))
        normed_RHE = gated_norm(out_RHE, z_RC.unflatten(1, (H, E)), self.norm_E, self.eps, KIMI)
        return self.o_proj(normed_RHE.flatten(1), partials=True)


def kimi_linear_layer(config: LatentConfig, index: int) -> PreNormLayer:
    """The layer of that number."""
    is_recurrent = config.layer_kinds[index].recurrent
    return PreNormLayer(
        config, KimiDeltaAttention(config) if is_recurrent else LatentAttention(config, index), mlp_of(config, index)
    )
