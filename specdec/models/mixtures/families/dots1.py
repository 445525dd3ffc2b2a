"""dots.llm1 (`dots1`): DeepSeek V3's mixtures under Qwen3's heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdec.attention.kinds import LayerKind
from specdec.models.checkpoints.config_values import flag, whole
from specdec.models.config import ModelConfig
from specdec.models.deepseek.config import parse_experts
from specdec.models.keys.names import by_own_names
from specdec.models.keys.shared import check_types, sliding_window, windowed_from, windowed_kinds
from specdec.models.mixtures.fill import USUAL as NAMES
from specdec.models.mixtures.keys import only, read_decoder, with_experts

_KEYS = (
    "attention_bias first_k_dense_replace layer_types max_window_layers moe_intermediate_size n_group n_routed_experts "
    "n_shared_experts norm_topk_prob routed_scaling_factor scoring_func sliding_window topk_group use_sliding_window"
)
_UNSAID = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": False}

__all__ = ["NAMES", "parse_dots1"]


def parse_dots1(raw: dict[str, Any], where: str) -> ModelConfig:
    raw = {**_UNSAID, **by_own_names(raw, dict.fromkeys(("num_experts", "num_local_experts"), "n_routed_experts"), where)}
    config = read_decoder(raw, where, _KEYS, positions=2048)
    only(raw, where, scoring_func="noaux_tc", use_sliding_window=False)
    biased, kinds = flag(raw, "attention_bias", where), _layer_kinds(raw, config.num_layers, where)
    config = replace(config, qkv_bias=biased, o_bias=biased, qk_norm=True, layer_kinds=kinds)
    experts = parse_experts(raw, where, whole(raw, "first_k_dense_replace", where, 0, least=0))
    return with_experts(config, experts, where, "n_routed_experts")


def _layer_kinds(raw: dict[str, Any], layers: int, where: str) -> tuple[LayerKind, ...]:
    """The window in layers from max_window_layers on, or in those of layer_types."""
    window, first = sliding_window(raw, where), whole(raw, "max_window_layers", where, 62, least=0)
    types = raw.get("layer_types")
    if types is None:
        types = windowed_from(first, layers, window)
    check_types(types, layers, where)
    return windowed_kinds(types, window, raw, where)
