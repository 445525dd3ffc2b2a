"""The layers of OLMo Hybrid: the gated delta net after a norm, and attention before one.

Shapes: T tokens, R rows asked for, H hidden size; V value heads of the delta rule.
"""

from __future__ import annotations

from torch import Tensor

from specdec.attention.inputs import AttentionFn
from specdec.models.causal_lm import PreNormLayer, TargetLayer
from specdec.models.layers import MLP, NoNorm, RMSNorm
from specdec.models.mixtures.wide_norms import WideNormAttention
from specdec.models.olmo_hybrid.config import OlmoHybridConfig
from specdec.models.recurrent.delta_net import GatedDeltaNet
from specdec.ops.rope import Rotation
from specdec.ops.rows import select_rows

GATED_EPS = 1e-5  # of the gated norm; rms_norm_eps is for the other norms


def delta_net(config: OlmoHybridConfig) -> GatedDeltaNet:
    """The gated delta net, whose projections are a matrix each in checkpoints."""
    assert config.recurrent is not None and config.recurrent.rule is not None
    V, (keys, _, values) = config.recurrent.rule.value_heads, config.recurrent.rule.kinds
    wide = {"q_proj": keys, "k_proj": keys, "v_proj": values, "g_proj": values}
    return GatedDeltaNet(config, wide, {"b_proj": V, "a_proj": V}, GATED_EPS, config.strongest)


class PostNormLayer(TargetLayer):
    """A block whose attention and MLP read the residual stream as it is, and are normed before they are added to it."""

    def __init__(self, config: OlmoHybridConfig) -> None:
        super().__init__()
        self.input_layernorm = NoNorm()
        self.self_attn, self.mlp = WideNormAttention(config), MLP(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x_TH: Tensor, normed_TH: Tensor, rotation: Rotation, attn: AttentionFn, layer: int, rows_R: Tensor | None = None
    ) -> tuple[Tensor, None]:
        """Nothing is left to be added."""
        attended = self.self_attn(normed_TH, rotation, attn, layer, rows_R)
        x = x_TH if rows_R is None else select_rows(x_TH, rows_R)
        x = self.post_attention_layernorm.add_normed(x, attended)
        return self.post_feedforward_layernorm.add_normed(x, self.mlp(x, partials=True)), None


def olmo_hybrid_layer(config: OlmoHybridConfig, index: int) -> TargetLayer:
    """The layer of that number."""
    if config.layer_kinds[index].recurrent:
        return PreNormLayer(config, delta_net(config), MLP(config))
    return PostNormLayer(config)
