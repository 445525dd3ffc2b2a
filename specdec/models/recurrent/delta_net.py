"""The gated delta net: projections, the gated delta rule with its convolution, a gated norm, the output projection.

A layer hands the pass what it has made of its tokens, and gates what comes back.  It knows neither which sequence a token
belongs to nor what is kept of it, and families tell it what checkpoints call its matrices.

Shapes: T tokens, R rows asked for, H hidden size; of the delta rule V value heads of E values, C channels of its convolution
(queries and keys of all key heads, values of V), Y = V E, Z taps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdec.attention.inputs import AttentionFn
from specdec.models.config import ModelConfig
from specdec.models.linear import Linear
from specdec.models.making import made_now, new_weight
from specdec.models.recurrent.inputs import RuleLayerInputs
from specdec.ops.products.partials import Partials
from specdec.ops.recurrent.conv import Convolution
from specdec.ops.recurrent.gated_delta import GATED_DELTA, Gates
from specdec.ops.recurrent.gates.gated_norm import gated_norm
from specdec.ops.rope import Rotation
from specdec.ops.rows import select_rows

ROWS = 8  # of a matrix: a multiple of so many is what the kernels of few tokens take (ops/products/tiles/dense.py)


class GatedDeltaNet(nn.Module):
    """in_proj: queries, keys, values, and the gates z of the outputs.  gates_proj: of each value head b, its strengths, then a,
    its decays; None if in_proj ends with them.

    wide, gates: the parts of these matrices, in this order, by a checkpoint's names.  eps: of the gated norm.  most: how strong
    a token can be.  conv_ZC: in the model's dtype.  A_log_V, dt_bias_V: float32 in a model of any dtype.
    """

    def __init__(self, config: ModelConfig, wide: dict[str, int], gates: dict[str, int], eps: float, most: float = 1.0) -> None:
        super().__init__()
        own, H, device = config.recurrent, config.hidden_size, made_now().device
        assert own is not None and own.rule is not None
        self.sizes, self.shard, self.eps, self.most = own.rule, config.shard, eps, most
        V = own.rule.value_heads
        assert sum(wide.values()) == own.channels + own.outputs and sum(gates.values()) == 2 * V
        in_one = config.quantization is None and (own.channels + own.outputs + 2 * V) % ROWS == 0
        self.in_proj = Linear.column(H, wide | gates if in_one else wide, config.shard)
        self.gates_proj = None if in_one else Linear.column(H, gates, config.shard)
        self.out_proj = Linear.row(own.outputs, H, config.shard)
        self.conv_ZC = new_weight(own.taps, own.channels)
        self.norm_E = new_weight(own.rule.value_width)
        self.A_log_V, self.dt_bias_V = (nn.Buffer(torch.empty(V, dtype=torch.float32, device=device)) for _ in range(2))

    def forward(
        self, x_TH: Tensor, rotation: Rotation, attn: AttentionFn, layer: int, rows_R: Tensor | None = None
    ) -> Tensor | Partials:
        """From x [T, H] to [T, H], or to [R, H] with rows_R.  Nothing turns with positions."""
        V, E, C = self.sizes.value_heads, self.sizes.value_width, self.conv_ZC.shape[1]
        x_TC, z_TY, gates_TW = self.in_proj(x_TH).tensor_split((C, C + V * E), dim=1)
        b_TV, a_TV = (gates_TW if self.gates_proj is None else self.gates_proj(x_TH)).chunk(2, dim=1)
        gates = Gates(a_TV, b_TV, self.A_log_V, self.dt_bias_V, self.most)
        out_RVE = attn(layer, RuleLayerInputs(x_TC, Convolution(self.conv_ZC), GATED_DELTA, gates, self.sizes), rows_R)
        z_RY = z_TY if rows_R is None else select_rows(z_TY, rows_R)
        normed_RVE = gated_norm(out_RVE, z_RY.unflatten(1, (V, E)), self.norm_E, self.eps)
        return self.out_proj(normed_RVE.flatten(1), partials=True)
