"""The config.json of Qwen's hybrids, read strictly.

Three of four layers keep a state in place of keys; the fourth is ordinary attention, whose output a gate multiplies.  What a
key that is absent means is what transformers' class of the family means.  This module knows no weights.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdec.attention.kinds import FULL, RECURRENT, LayerKind
from specdec.models.checkpoints.config_values import MAX_LAYERS, NotComputedHere, flag, text, whole
from specdec.models.checkpoints.mtp_names import count_key
from specdec.models.config import ModelConfig
from specdec.models.keys.rope import without_mrope
from specdec.models.keys.shared import check_types, require
from specdec.models.mixtures.keys import TOP_K, layer_numbers, only, read_decoder, with_experts
from specdec.models.mixtures.rules import ExpertsConfig
from specdec.models.recurrent.sizes import RecurrentConfig, RuleSizes
from specdec.ops.products.routing import RouterRule

NEXT = "qwen3_next"
DENSE, MIXTURE = "qwen3_5_text", "qwen3_5_moe_text"
FAMILIES = (NEXT, DENSE, MIXTURE)
LINEAR = "linear_attention"  # in a config's layer_types
_COMMON = (
    "attention_bias attn_output_gate full_attention_interval layer_types linear_conv_kernel_dim linear_key_head_dim "
    "linear_num_key_heads linear_num_value_heads linear_value_head_dim mamba_ssm_dtype mlp_only_layers "
    f"mtp_use_dedicated_embeddings output_gate_type use_sliding_window {count_key(DENSE)}"
)
_MIXTURES = "moe_intermediate_size num_experts shared_expert_intermediate_size"
# What transformers' classes mean by sizes that a config does not say.
_SIZES = {
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
_NEXT_SIZES = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 512, TOP_K: 10}
_MOE_SIZES = {**_NEXT_SIZES, "num_experts": 256, TOP_K: 8}


def parse_qwen_hybrid(raw: dict[str, Any], where: str) -> ModelConfig:
    """A target's config.  ValueError names `where` (the file), the key, what was expected and what was found."""
    family, said = raw["model_type"], without_mrope(raw, where)
    if family == MIXTURE:  # the class has no such key: every layer is a mixture
        only(raw, where, mlp_only_layers=[])
        said.setdefault("intermediate_size", _MOE_SIZES["moe_intermediate_size"])
    keys = _COMMON if family == DENSE else f"{_COMMON} {_MIXTURES}"
    if family == NEXT:
        keys += " decoder_sparse_step norm_topk_prob"
    config = read_decoder(said, where, keys, positions=32768, head_dim=256, rotated=0.25)
    only(raw, where, attn_output_gate=True, mamba_ssm_dtype="float32", mtp_use_dedicated_embeddings=False)
    only(raw, where, use_sliding_window=False)
    if (gate := text(raw, "output_gate_type", where)) not in (None, "swish", "silu"):
        raise NotComputedHere(f"{where}: output_gate_type must be 'swish' or 'silu', which are one, got {gate!r}")
    biased = flag(raw, "attention_bias", where)
    config = replace(
        config, qkv_bias=biased, o_bias=biased, qk_norm=True, zero_centred_norms=True, recurrent=_recurrent(raw, where),
        layer_kinds=_layer_kinds(raw, config.num_layers, where), mtp_layers=_mtp_layers(raw, where),
    )  # fmt: skip
    if family == DENSE:
        only(raw, where, mlp_only_layers=[])
        return config
    return _with_experts(config, raw, where)


def _layer_kinds(raw: dict[str, Any], count: int, where: str) -> tuple[LayerKind, ...]:
    """By layer_types, or else by every how many layers one is of ordinary attention."""
    types = raw.get("layer_types")
    interval = whole(raw, "full_attention_interval", where, 4)
    if types is None:
        types = [LINEAR if (layer + 1) % interval else "full_attention" for layer in range(count)]
    check_types(types, count, where, LINEAR)
    if len(set(types)) == 1:
        raise NotComputedHere(
            f"{where}: layers must be of both kinds, by layer_types, or by full_attention_interval {interval} where that is "
            f"absent; got {count} of {types[0]}"
        )
    return tuple(RECURRENT if kind == LINEAR else FULL for kind in types)


def _recurrent(raw: dict[str, Any], where: str) -> RecurrentConfig:
    key_heads, value_heads, key_width, value_width, taps = (
        whole(raw, key, where, size, least=2 if key == "linear_conv_kernel_dim" else 1) for key, size in _SIZES.items()
    )
    if value_heads % key_heads:
        raise ValueError(
            f"{where}: linear_num_value_heads must be a multiple of linear_num_key_heads, got {value_heads}, {key_heads}"
        )
    return RecurrentConfig(taps, RuleSizes(key_heads, value_heads, key_width, value_width, in_blocks=True))


def _mtp_layers(raw: dict[str, Any], where: str) -> int:
    """Qwen3-Next's files don't say that they have one layer; there a checkpoint without any shows it (mtp_names.py)."""
    return whole(raw, count_key(DENSE), where, int(raw["model_type"] == NEXT), least=0, most=MAX_LAYERS)


def _with_experts(config: ModelConfig, raw: dict[str, Any], where: str) -> ModelConfig:
    is_next = raw["model_type"] == NEXT
    sizes = _NEXT_SIZES if is_next else _MOE_SIZES
    count = whole(raw, "num_experts", where, sizes["num_experts"], least=int(not is_next))
    dense = frozenset[int]()
    if is_next:
        step = whole(raw, "decoder_sparse_step", where, 1)
        dense = layer_numbers(raw, "mlp_only_layers", config.num_layers, where)
        dense |= {layer for layer in range(config.num_layers) if (layer + 1) % step or not count}
    if len(dense) == config.num_layers:
        return config
    shared = whole(raw, "shared_expert_intermediate_size", where, sizes["shared_expert_intermediate_size"])
    experts = ExpertsConfig(
        count,
        whole(raw, "moe_intermediate_size", where, sizes["moe_intermediate_size"]),
        RouterRule(whole(raw, TOP_K, where, sizes[TOP_K]), "softmax", normed=flag(raw, "norm_topk_prob", where, True)),
        shared_size=shared,
        shared_gated=True,
        dense_layers=dense,
    )
    if experts.dense_layers:
        require(raw, ["intermediate_size"], where)
    return with_experts(config, experts, where, "num_experts")
