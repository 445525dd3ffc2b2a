"""How Bamba lies in checkpoints."""

from __future__ import annotations

from specdec.models.bamba.config import ATTENTION, parse_bamba
from specdec.models.bamba.modules import bamba_layer
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.frame import Family
from specdec.models.checkpoints.loader import Parts, fill_attention, fill_mlp
from specdec.models.config import ModelConfig
from specdec.models.layers import MLP, SelfAttention
from specdec.models.mamba.filling import expect_mamba, fill_mamba
from specdec.models.mamba.mixer import Mamba2
from specdec.models.recurrent.fill import expect_kinds

SIZES = f"the mamba_* sizes, {ATTENTION}"


def _fill_mamba(net: Mamba2, checkpoint: Checkpoint, prefix: str) -> None:
    fill_mamba(net, checkpoint, f"{prefix.rpartition('.')[0]}.mamba")


def _fill_mlp(mlp: MLP, checkpoint: Checkpoint, prefix: str) -> None:
    fill_mlp(mlp, checkpoint, f"{prefix.rpartition('.')[0]}.feed_forward")


def _expect(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """ValueError if a config's sizes are not those of the first layer of each kind, by the headers."""
    H, D, recurrent = config.hidden_size, config.head_dim, config.recurrent_layers
    expect_kinds(checkpoint, config, ("self_attn.q_proj.weight", "mamba.A_log"), ("attention", "Mamba-2"), ATTENTION)
    first = f"model.layers.{min(set(range(config.num_layers)) - set(recurrent))}.self_attn"
    checkpoint.expect_matrix(f"{first}.q_proj", (config.num_heads * D, H), "num_attention_heads, head_dim and hidden_size")
    checkpoint.expect_matrix(f"{first}.k_proj", (config.num_kv_heads * D, H), "num_key_value_heads, head_dim, hidden_size")
    if recurrent:
        expect_mamba(checkpoint, config, f"model.layers.{recurrent[0]}.mamba", SIZES)
    gate = "model.layers.0.feed_forward.gate_proj"
    checkpoint.expect_matrix(gate, (config.intermediate_size, H), "intermediate_size and hidden_size")


PARTS: Parts = {SelfAttention: fill_attention, Mamba2: _fill_mamba, MLP: _fill_mlp}
NORMS = {"norm": ("final_layernorm",), "post_attention_layernorm": ("pre_ff_layernorm",)}
FAMILY = Family(parse_bamba, bamba_layer, _expect, PARTS, {ATTENTION: "none, so that all layers are Mamba-2's"}, NORMS)
