"""A layer of Mamba-2 (arXiv 2405.21060): projections, the rule with its convolution, a gated norm, the output projection.

The layer hands the pass what it has made of its tokens, and gates what comes back.  Which sequence a token belongs to, and what
is kept of it, it does not know.

Shapes: T tokens, R rows asked for, H hidden size, V heads of E values, Y = V E, G groups, C channels of the convolution (C and
B of all groups, x of all heads), Z taps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specdec.attention.inputs import AttentionFn
from specdec.models.linear import Linear
from specdec.models.making import made_now, new_weight
from specdec.models.mamba.config import MambaConfig
from specdec.models.recurrent.inputs import RuleLayerInputs
from specdec.ops.products.partials import Partials
from specdec.ops.recurrent.conv import Convolution
from specdec.ops.recurrent.gates.gated_norm import gated_norm
from specdec.ops.recurrent.gates.output_gate import gated_output
from specdec.ops.recurrent.ssd import SSD, SsdGates
from specdec.ops.rope import Rotation
from specdec.ops.rows import select_rows


class Mamba2(nn.Module):
    """in_proj: C of all groups, B of all groups, x of all heads, their gates z, and dt, how far each head's step goes.

    conv_ZC, conv_bias_C, norm_Y: in the model's dtype.  A_log_V, D_V, dt_bias_V: float32 in a model of any dtype.
    """

    def __init__(self, config: MambaConfig) -> None:
        super().__init__()
        own, H, device = config.recurrent, config.hidden_size, made_now().device
        assert own is not None and own.rule is not None
        self.sizes, self.shard, self.eps, self.gated_norm = own.rule, config.shard, config.rms_norm_eps, config.gated_norm
        rows = own.channels + own.outputs + own.rule.value_heads
        self.in_proj = Linear.column(H, {"in_proj": rows}, config.shard, config.in_bias)
        self.out_proj = Linear.row(own.outputs, H, config.shard, config.out_bias)
        self.conv_ZC = new_weight(own.taps, own.channels)
        self.conv_bias_C = new_weight(own.channels) if config.conv_bias else None
        self.norm_Y = None if config.gated_norm is None else new_weight(own.outputs)
        self.A_log_V, self.D_V, self.dt_bias_V = (
            nn.Buffer(torch.empty(own.rule.value_heads, dtype=torch.float32, device=device)) for _ in range(3)
        )

    def forward(
        self, x_TH: Tensor, rotation: Rotation | None, attn: AttentionFn, layer: int, rows_R: Tensor | None = None
    ) -> Tensor | Partials:
        """From x [T, H] to [T, H], or to [R, H] with rows_R.  The caller adds the result to the residual stream."""
        C, Y = self.conv_ZC.shape[1], self.sizes.outputs
        x_TC, z_TY, dt_TV = self.project(x_TH).tensor_split((C, C + Y), dim=1)
        gates = SsdGates(dt_TV, self.A_log_V, self.dt_bias_V, self.D_V)
        conv = Convolution(self.conv_ZC, self.conv_bias_C)
        out_RVE = attn(layer, RuleLayerInputs(x_TC, conv, SSD, gates, self.sizes), rows_R)
        if self.gated_norm is None:
            z_TVE = z_TY.unflatten(1, out_RVE.shape[1:])
            return self.out_proj(gated_output(out_RVE, z_TVE, rows_R, silu=True), partials=True)
        assert self.norm_Y is not None
        z_RY, groups = z_TY if rows_R is None else select_rows(z_TY, rows_R), (self.sizes.key_heads, -1)
        by_group = out_RVE.flatten(1).unflatten(1, groups), z_RY.unflatten(1, groups), self.norm_Y.unflatten(0, groups)
        return self.out_proj(gated_norm(*by_group, self.eps, self.gated_norm).flatten(1), partials=True)

    def project(self, x_TH: Tensor) -> Tensor:
        """[T, C + Y + V], in the order of in_proj's rows."""
        return self.in_proj(x_TH)
