"""How Falcon-H1 lies in checkpoints: both of a layer's modules by their names, and a last norm of another name."""

from __future__ import annotations

import torch

from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.frame import Family
from specdec.models.checkpoints.loader import Parts, expect_attention, fill_attention, fill_mlp
from specdec.models.config import ModelConfig
from specdec.models.falcon_h1.config import parse_falcon_h1
from specdec.models.falcon_h1.modules import FalconAttention, FalconLayer, FalconMamba, FalconMLP
from specdec.models.mamba.filling import expect_mamba, fill_mamba

SIZES = "mamba_d_ssm and the other mamba_* sizes"


def _expect(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """ValueError if a config's sizes are not those of the first layer, by the headers."""
    expect_attention(checkpoint, config)
    expect_mamba(checkpoint, config, "model.layers.0.mamba", SIZES)
    gate = "model.layers.0.feed_forward.gate_proj"
    checkpoint.expect_matrix(gate, (config.intermediate_size, config.hidden_size), "intermediate_size and hidden_size")


def _fill_attention(attention: FalconAttention, checkpoint: Checkpoint, prefix: str) -> None:
    """Scales of fp8 keys are those of multiplied keys, and our caches hold keys before that."""
    fill_attention(attention, checkpoint, prefix)
    if attention.kv_scale_2K is not None:
        keys_K, values_K = attention.kv_scale_2K
        attention.kv_scale_2K = torch.stack((keys_K / attention.key_multiplier, values_K))


PARTS: Parts = {FalconAttention: _fill_attention, FalconMamba: fill_mamba, FalconMLP: fill_mlp}
FAMILY = Family(parse_falcon_h1, FalconLayer, _expect, PARTS, norms={"norm": ("final_layernorm",)})
