"""Qwen2-MoE and Qwen3-MoE: softmax routers whose weights may be normed; Qwen2's shared expert has a gate of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdec.attention.kinds import FULL, LayerKind
from specdec.models.checkpoints.config_values import flag, whole
from specdec.models.config import ModelConfig
from specdec.models.keys.names import by_own_names
from specdec.models.keys.shared import WINDOWED, check_types, require, sliding_window, windowed_kinds
from specdec.models.mixtures.fill import MixtureNames
from specdec.models.mixtures.keys import TOP_K, layer_numbers, only, read_decoder, with_experts
from specdec.models.mixtures.rules import ExpertsConfig
from specdec.ops.products.routing import RouterRule

NAMES = MixtureNames(
    shared="mlp.shared_expert", count_keys="num_experts and hidden_size", shared_keys="shared_expert_intermediate_size",
    layer_keys="mlp_only_layers and decoder_sparse_step",
)  # fmt: skip
_BOTH = (
    "decoder_sparse_step max_window_layers mlp_only_layers moe_intermediate_size norm_topk_prob num_experts sliding_window "
    "use_sliding_window"
)
_QWEN3_ONLY = {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}  # of Qwen3-Coder's file


def parse_qwen3_moe(raw: dict[str, Any], where: str) -> ModelConfig:
    raw = by_own_names(raw, {"num_local_experts": "num_experts"}, where)
    config = read_decoder(raw, where, f"attention_bias {' '.join(_QWEN3_ONLY)} {_BOTH}", positions=32768)
    only(raw, where, **_QWEN3_ONLY)
    biased = flag(raw, "attention_bias", where)
    window = _window(raw, where)
    kinds = (FULL if window is None else LayerKind(window=window),) * config.num_layers
    return _with_experts(replace(config, qkv_bias=biased, o_bias=biased, qk_norm=True, layer_kinds=kinds), raw, where, 0)


def parse_qwen2_moe(raw: dict[str, Any], where: str) -> ModelConfig:
    config = read_decoder(raw, where, f"layer_types qkv_bias shared_expert_intermediate_size {_BOTH}", positions=32768)
    require(raw, ["shared_expert_intermediate_size"], where)
    shared = whole(raw, "shared_expert_intermediate_size", where)
    kinds = _alternating(raw, config.num_layers, where)
    return _with_experts(replace(config, qkv_bias=flag(raw, "qkv_bias", where, True), layer_kinds=kinds), raw, where, shared)


def _with_experts(config: ModelConfig, raw: dict[str, Any], where: str, shared: int) -> ModelConfig:
    require(raw, ["num_experts", TOP_K, "moe_intermediate_size"], where)
    step = whole(raw, "decoder_sparse_step", where, 1)
    dense = layer_numbers(raw, "mlp_only_layers", config.num_layers, where)
    dense |= {layer for layer in range(config.num_layers) if (layer + 1) % step}
    rule = RouterRule(whole(raw, TOP_K, where), "softmax", normed=flag(raw, "norm_topk_prob", where))
    experts = ExpertsConfig(
        whole(raw, "num_experts", where),
        whole(raw, "moe_intermediate_size", where),
        rule,
        shared_size=shared,
        shared_gated=shared > 0,
        dense_layers=dense,
    )
    return with_experts(config, experts, where, "num_experts")


def _window(raw: dict[str, Any], where: str) -> int | None:
    """The window, if it is switched on."""
    whole(raw, "max_window_layers", where, 28, least=0)
    if not flag(raw, "use_sliding_window", where):  # the files say 0 or any number then
        whole(raw, "sliding_window", where, 0, least=0)
        return None
    return sliding_window(raw, where)


def _alternating(raw: dict[str, Any], layers: int, where: str) -> tuple[LayerKind, ...]:
    """Qwen2-MoE's: every other layer below max_window_layers has the window, the first among them, or those of layer_types."""
    window, types = _window(raw, where), raw.get("layer_types")
    is_on, end = flag(raw, "use_sliding_window", where), whole(raw, "max_window_layers", where, 28, least=0)
    if types is None:
        types = [WINDOWED if is_on and layer % 2 == 0 and layer < end else "full_attention" for layer in range(layers)]
    check_types(types, layers, where)
    return windowed_kinds(types, window, raw, where)
