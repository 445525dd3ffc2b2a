"""What MiMo-V2-Flash has of its own in checkpoints: sinks, and keys and values of unlike widths.  Knows names."""

from __future__ import annotations

from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.frame import Family
from specdec.models.checkpoints.loader import Parts, fill_attention, fill_float32, fill_mlp
from specdec.models.layers import MLP
from specdec.models.mimo_v2.config import MiMoConfig, parse_mimo_v2
from specdec.models.mimo_v2.modules import SplitAttention, mimo_layer
from specdec.models.mixtures.fill import MixtureNames, expect_mixture, fill_mixture
from specdec.models.mixtures.layer import MixtureOfExperts

NAMES = MixtureNames(
    count_keys="n_routed_experts, after layers that moe_layer_freq (or mlp_layer_types) calls dense",
    layer_keys="moe_layer_freq (or mlp_layer_types)",
)
SINKS = ("attention_sink_bias", "sinks")  # the publisher's name, and transformers' own


def _expect(checkpoint: Checkpoint, config: MiMoConfig) -> None:
    """The heads of the first layer of each kind."""
    H = config.hidden_size
    for prefix, kind in (("", "full"), ("swa_", "windowed")):
        layer = next((i for i, own in enumerate(config.layer_kinds) if bool(own.window) == bool(prefix)), None)
        if layer is None:
            continue
        heads, attention = config.heads_of(layer), f"model.layers.{layer}.self_attn"
        for part, rows, said in (
            ("q_proj", heads.num_heads * heads.head_dim, f"{prefix}num_attention_heads, {prefix}head_dim"),
            ("k_proj", heads.num_kv_heads * heads.head_dim, f"{prefix}num_key_value_heads, {prefix}head_dim"),
            ("v_proj", heads.num_kv_heads * heads.value_dim, f"{prefix}num_key_value_heads, {prefix}v_head_dim"),
        ):
            checkpoint.expect_matrix(f"{attention}.{part}", (rows, H), f"{said} and hidden_size, of {kind} layers")
    expect_mixture(checkpoint, config, NAMES)


def _fill_attention(attention: SplitAttention, checkpoint: Checkpoint, prefix: str) -> None:
    fill_attention(attention, checkpoint, prefix)
    if attention.sinks_Q is None:
        return
    first, whole = (rows // attention.head_dim for rows in attention.qkv_proj.rows_of("q_proj"))
    own = slice(first, first + attention.num_heads)
    name = next((f"{prefix}.{each}" for each in SINKS if f"{prefix}.{each}" in checkpoint), f"{prefix}.{SINKS[0]}")
    attention.sinks_Q = fill_float32(attention.sinks_Q, checkpoint, name, own, whole)


def _fill_mixture(moe: MixtureOfExperts, checkpoint: Checkpoint, prefix: str) -> None:
    fill_mixture(moe, checkpoint, prefix, NAMES)


PARTS: Parts = {SplitAttention: _fill_attention, MLP: fill_mlp, MixtureOfExperts: _fill_mixture}
UNSAID = {
    "swa_num_key_value_heads": "twice num_key_value_heads",
    "attention_value_scale": "0.707 (null: 1)",
    "rms_norm_eps": "1e-5 (layernorm_epsilon is another name)",
    "max_position_embeddings": "131072",
}
FAMILY = Family(parse_mimo_v2, mimo_layer, _expect, PARTS, UNSAID)
