"""Layers of Bamba: ordinary ones, but that most have Mamba-2 in place of attention."""

from __future__ import annotations

from specdec.models.causal_lm import PreNormLayer
from specdec.models.layers import MLP, SelfAttention
from specdec.models.mamba.config import MambaConfig
from specdec.models.mamba.mixer import Mamba2


def bamba_layer(config: MambaConfig, index: int) -> PreNormLayer:
    """The layer of that number in a target."""
    mixer = Mamba2(config) if config.layer_kinds[index].recurrent else SelfAttention(config, config.hidden_size)
    return PreNormLayer(config, mixer, MLP(config))
