"""Layers of Granite 4's hybrids: attention with a scale of its own, MLPs of one fused matrix, and blocks whose outputs are
multiplied before they are added.

Shapes: T tokens, R rows asked for, H hidden size.
"""

from __future__ import annotations

from torch import Tensor

from specdec.attention.inputs import AttentionFn
from specdec.attention.kinds import Scoring
from specdec.models.causal_lm import PreNormLayer
from specdec.models.granite_hybrid.config import GraniteConfig
from specdec.models.layers import MLP, SelfAttention
from specdec.models.linear import Linear
from specdec.models.mamba.mixer import Mamba2
from specdec.models.mixtures.layer import MixtureOfExperts
from specdec.ops.products.partials import Partials, multiplied
from specdec.ops.rope import Rotation
from specdec.ops.rows import select_rows

INPUT = "input_linear"  # a checkpoint's matrix of gates and ups


class GraniteAttention(SelfAttention):
    """SelfAttention whose scale is a number of the config."""

    def __init__(self, config: GraniteConfig) -> None:
        super().__init__(config, config.hidden_size)
        self.scale = config.attention_scale

    @property
    def scoring(self) -> Scoring:
        return Scoring(scale=self.scale)


class FusedMLP(MLP):
    """An MLP whose gates and ups are one matrix of the checkpoint."""

    def __init__(self, config: GraniteConfig, width: int) -> None:
        super().__init__(config)
        self.gate_up_proj = Linear.column(config.hidden_size, {INPUT: 2 * width}, config.shard)
        self.down_proj = Linear.row(width, config.hidden_size, config.shard)


class GraniteMixture(MixtureOfExperts):
    """A mixture beside such an MLP."""

    def __init__(self, config: GraniteConfig) -> None:
        assert config.experts is not None
        super().__init__(config, config.experts)
        self.shared = FusedMLP(config, config.experts.shared_size)


class GraniteLayer(PreNormLayer):
    """A pre-norm block that adds its outputs times a number."""

    def __init__(self, config: GraniteConfig, index: int) -> None:
        mixer = Mamba2(config) if config.layer_kinds[index].recurrent else GraniteAttention(config)
        mlp = FusedMLP(config, config.intermediate_size) if config.experts is None else GraniteMixture(config)
        super().__init__(config, mixer, mlp)
        self.multiplier = config.residual_multiplier

    def forward(
        self,
        x_TH: Tensor,
        normed_TH: Tensor,
        rotation: Rotation,
        attn: AttentionFn,
        layer: int,
        rows_R: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | Partials]:
        """As of PreNormLayer."""
        mixed = multiplied(self.self_attn(normed_TH, rotation, attn, layer, rows_R), self.multiplier)
        x = x_TH if rows_R is None else select_rows(x_TH, rows_R)
        x, normed = self.post_attention_layernorm.add(x, mixed)
        return x, multiplied(self.mlp(normed, partials=True), self.multiplier)
