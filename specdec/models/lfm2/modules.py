"""The layers of LFM2: a gated short convolution, or ordinary attention, before an MLP or a mixture.

Shapes: T tokens, R rows asked for, H hidden size, C channels of a rank's share of the convolution, Z taps.
"""

from __future__ import annotations

from torch import Tensor, nn

from specdec.attention.inputs import AttentionFn
from specdec.models.causal_lm import PreNormLayer
from specdec.models.layers import SelfAttention
from specdec.models.lfm2.config import Lfm2Config
from specdec.models.linear import Linear
from specdec.models.making import new_weight
from specdec.models.mixtures.layer import mlp_of
from specdec.models.recurrent.inputs import RecurrentInputs
from specdec.ops.products.partials import Partials
from specdec.ops.recurrent.conv import Convolution
from specdec.ops.rope import Rotation
from specdec.ops.rows import select_rows


class ShortConvolution(nn.Module):
    """out_proj(C * convolution(B * x)), of which in_proj yields B, C and x, each as wide as the hidden states.

    conv_ZC, bias_C: in the model's dtype.
    """

    def __init__(self, config: Lfm2Config) -> None:
        super().__init__()
        own, H, biased = config.recurrent, config.hidden_size, config.conv_bias
        assert own is not None and own.rule is None
        self.shard = config.shard
        self.in_proj = Linear.column(H, {"in_proj": 3 * own.width}, config.shard, biased)
        self.conv_ZC = new_weight(own.taps, own.width)
        self.bias_C = new_weight(own.width) if biased else None
        self.out_proj = Linear.row(own.width, H, config.shard, biased)

    def forward(
        self, x_TH: Tensor, rotation: Rotation, attn: AttentionFn, layer: int, rows_R: Tensor | None = None
    ) -> Tensor | Partials:
        """As of SelfAttention.  Nothing turns with positions."""
        b_TC, c_TC, x_TC = self.in_proj(x_TH).chunk(3, dim=1)
        conv = Convolution(self.conv_ZC, self.bias_C, silu=False)
        out_RC = attn(layer, RecurrentInputs(b_TC * x_TC, conv), rows_R)
        c_RC = c_TC if rows_R is None else select_rows(c_TC, rows_R)
        return self.out_proj(c_RC * out_RC, partials=True)


def lfm2_layer(config: Lfm2Config, index: int) -> PreNormLayer:
    """The layer of that number."""
    is_recurrent = config.layer_kinds[index].recurrent
    mixer = ShortConvolution(config) if is_recurrent else SelfAttention(config, config.hidden_size)
    return PreNormLayer(config, mixer, mlp_of(config, index))
