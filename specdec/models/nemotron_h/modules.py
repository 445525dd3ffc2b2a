"""Layers of Nemotron-H: a norm and one block, which is Mamba-2, attention, an MLP without a gate, or a mixture of such.

Shapes: T tokens, R rows asked for, H hidden size.
"""

from __future__ import annotations

from torch import Tensor, nn

from specdec.attention.inputs import AttentionFn
from specdec.models.causal_lm import PreNormLayer, TargetLayer
from specdec.models.layers import ReluMLP, RMSNorm, SelfAttention
from specdec.models.mamba.config import MambaConfig
from specdec.models.mamba.mixer import Mamba2
from specdec.models.mixtures.layer import MixtureOfExperts
from specdec.ops.products.partials import Delta
from specdec.ops.rope import Rotation
from specdec.ops.rows import select_rows


class OneBlockLayer(TargetLayer):
    """mixer: the block, under a checkpoint's name.  remembers: whether it keeps keys or a state of the text."""

    def __init__(self, config: MambaConfig, index: int) -> None:
        super().__init__()
        kind = config.layer_kinds[index]
        self.remembers = kind.attends or kind.recurrent
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixer = _block(config, index)

    def forward(
        self,
        x_TH: Tensor,
        normed_TH: Tensor,
        rotation: Rotation,
        attn: AttentionFn,
        layer: int,
        rows_R: Tensor | None = None,
    ) -> tuple[Tensor, Delta]:
        x = x_TH if rows_R is None else select_rows(x_TH, rows_R)
        if self.remembers:
            return x, self.mixer(normed_TH, rotation, attn, layer, rows_R)
        return x, self.mixer(normed_TH if rows_R is None else select_rows(normed_TH, rows_R), partials=True)


def _block(config: MambaConfig, index: int) -> nn.Module:
    kind, experts = config.layer_kinds[index], config.experts
    if kind.recurrent:
        return Mamba2(config)
    if kind.attends:
        return SelfAttention(config, config.hidden_size)
    if experts is None or index in experts.dense_layers:
        return ReluMLP(config, config.intermediate_size)
    return MixtureOfExperts(config, experts)


def mtp_layer(config: MambaConfig, index: int) -> PreNormLayer:
    """The decoder layer of MTP: a block of attention, and then one of a mixture, each with its norm."""
    assert config.experts is not None
    return PreNormLayer(config, SelfAttention(config, config.hidden_size), MixtureOfExperts(config, config.experts))
