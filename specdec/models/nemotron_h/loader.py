"""How Nemotron-H lies in checkpoints: a layer's block is its `mixer`, and `backbone` holds them (keys/tensor_names.py)."""

from __future__ import annotations

from specdec.models.checkpoints.checkpoint import Checkpoint, config_path
from specdec.models.checkpoints.frame import Family
from specdec.models.checkpoints.loader import Parts, fill_attention, fill_linear, fill_parts
from specdec.models.config import ModelConfig
from specdec.models.layers import ReluMLP, SelfAttention
from specdec.models.mamba.filling import expect_mamba, fill_mamba
from specdec.models.mamba.mixer import Mamba2
from specdec.models.mixtures.fill import MixtureNames, fill_mixture
from specdec.models.mixtures.layer import MixtureOfExperts
from specdec.models.nemotron_h.config import PATTERN, TYPES, parse_nemotron_h
from specdec.models.nemotron_h.modules import OneBlockLayer

SIZES = "mamba_num_heads, mamba_head_dim, ssm_state_size, n_groups, conv_kernel"
NAMES = MixtureNames(
    "mixer.gate.weight", "mixer.gate.e_score_correction_bias", experts="mixer.experts", shared="", layer_keys=""
)
# By the kind of a layer: a tensor below its mixer that no other kind has.
_MARKS = {
    "linear_attention": "A_log", "full_attention": "q_proj.weight", "moe": "gate.weight", "mlp": "up_proj.weight",
}  # fmt: skip


def _fill_mlp(mlp: ReluMLP, checkpoint: Checkpoint, prefix: str) -> None:
    fill_parts(mlp.up_proj, checkpoint, prefix)
    fill_linear(mlp.down_proj, checkpoint, f"{prefix}.down_proj")


def _fill_mixture(moe: MixtureOfExperts, checkpoint: Checkpoint, prefix: str) -> None:
    fill_mixture(moe, checkpoint, prefix, NAMES)
    assert isinstance(moe.shared, ReluMLP)
    _fill_mlp(moe.shared, checkpoint, f"{prefix}.shared_experts")
    for matrix, name in ((moe.to_latents, "fc1_latent_proj"), (moe.from_latents, "fc2_latent_proj")):
        if matrix is not None:
            fill_linear(matrix, checkpoint, f"{prefix}.{name}")


def _expect(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """ValueError if a config's sizes are not those of the first layer of each kind, by the headers."""
    H, D, experts = config.hidden_size, config.head_dim, config.experts
    words = [_word(config, layer) for layer in range(config.num_layers)]
    _expect_kinds(checkpoint, words)

    def mixer(word: str) -> str:
        return f"model.layers.{words.index(word)}.mixer"

    attention = mixer("full_attention")
    checkpoint.expect_matrix(f"{attention}.q_proj", (config.num_heads * D, H), "num_attention_heads, head_dim and hidden_size")
    checkpoint.expect_matrix(f"{attention}.k_proj", (config.num_kv_heads * D, H), "num_key_value_heads, head_dim, hidden_size")
    expect_mamba(checkpoint, config, mixer("linear_attention"), SIZES)
    if "mlp" in words:
        checkpoint.expect_matrix(f"{mixer('mlp')}.up_proj", (config.intermediate_size, H), "intermediate_size and hidden_size")
    if experts is None:
        return
    moe, wide = mixer("moe"), experts.latent_size or H
    checkpoint.expect(f"{moe}.gate.weight", (experts.count, H), "n_routed_experts and hidden_size")
    size = (experts.intermediate_size, wide)
    checkpoint.expect_matrix(f"{moe}.experts.0.up_proj", size, "moe_intermediate_size, and moe_latent_size or hidden_size")
    shared = (experts.shared_size, H)
    checkpoint.expect_matrix(f"{moe}.shared_experts.up_proj", shared, "moe_shared_expert_intermediate_size")


def _word(config: ModelConfig, layer: int) -> str:
    kind = config.layer_kinds[layer]
    if kind.recurrent or kind.attends:
        return "linear_attention" if kind.recurrent else "full_attention"
    return "mlp" if layer in config.dense_mlp_layers else "moe"


def _expect_kinds(checkpoint: Checkpoint, words: list[str]) -> None:
    """ValueError if a layer is of one kind by config.json and of another by its tensors."""
    for layer, word in enumerate(words):
        held = [kind for kind, mark in _MARKS.items() if f"model.layers.{layer}.mixer.{mark}" in checkpoint]
        if held and word not in held:
            raise ValueError(
                f"{config_path(checkpoint.folder)}: layer {layer} is of {word} by {TYPES} (or by {PATTERN}), but of {held[0]} "
                "by its tensors"
            )


PARTS: Parts = {
    Mamba2: fill_mamba, SelfAttention: fill_attention, ReluMLP: _fill_mlp, MixtureOfExperts: _fill_mixture,
}  # fmt: skip


def _fill_mtp_attention(attention: SelfAttention, checkpoint: Checkpoint, prefix: str) -> None:
    fill_attention(attention, checkpoint, f"{prefix.rpartition('.')[0]}.0.mixer")


def _fill_mtp_mixture(moe: MixtureOfExperts, checkpoint: Checkpoint, prefix: str) -> None:
    _fill_mixture(moe, checkpoint, f"{prefix.rpartition('.')[0]}.1.mixer")


MTP_PARTS: Parts = {SelfAttention: _fill_mtp_attention, MixtureOfExperts: _fill_mtp_mixture}
FAMILY = Family(parse_nemotron_h, OneBlockLayer, _expect, PARTS)
