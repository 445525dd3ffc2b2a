"""Hy3 (`hy_v3`): a sigmoid router with corrections, under heads whose queries and keys are normed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdec.models.checkpoints.config_values import MAX_LAYERS, NotComputedHere, flag, number, whole
from specdec.models.config import ModelConfig
from specdec.models.keys.names import by_own_names
from specdec.models.keys.shared import MTP_COUNT, require
from specdec.models.mixtures.fill import MixtureNames
from specdec.models.mixtures.keys import TOP_K, dense_by_types, only, read_decoder, with_experts
from specdec.models.mixtures.rules import ExpertsConfig
from specdec.ops.products.routing import RouterRule

COUNT, SHARED = "num_experts and hidden_size", "num_shared_experts and moe_intermediate_size"
NAMES = MixtureNames(
    "mlp.router.gate.weight", "mlp.expert_bias", shared="mlp.shared_mlp", count_keys=COUNT, shared_keys=SHARED,
    layer_keys="mlp_layer_types",
)  # fmt: skip
FUSED = MixtureNames(correction="mlp.e_score_correction_bias", count_keys=COUNT, shared_keys=SHARED)  # transformers 5's own
_ONLY = dict.fromkeys(("moe_router_enable_expert_bias", "moe_router_use_sigmoid", "qk_norm", "route_norm"), True)
_ROUNDING = "enable_attention_fp32_softmax", "enable_lm_head_fp32", "enable_moe_fp32_combine"  # transformers has but the last
_KEYS = (
    "attention_bias eod_token_id first_k_dense_replace mlp_bias mlp_layer_types moe_intermediate_size num_experts "
    f"num_shared_experts router_scaling_factor use_grouped_mm {MTP_COUNT} {' '.join((*_ONLY, *_ROUNDING))}"
)


def parse_hy_v3(raw: dict[str, Any], where: str) -> ModelConfig:
    raw = by_own_names(raw, {"num_local_experts": "num_experts", "expert_hidden_dim": "moe_intermediate_size"}, where)
    config = read_decoder(raw, where, _KEYS, eps=1e-5, positions=131072, theta=11_158_840.0, head_dim=128)
    require(raw, ["num_experts", TOP_K, "moe_intermediate_size"], where)
    only(raw, where, **_ONLY)
    flag(raw, "use_grouped_mm", where)  # how transformers multiplies
    for key in _ROUNDING:  # softmax and logits are summed in float32 in any case, and a sum of two is rounded once either way
        flag(raw, key, where, True)
    dense_layers = dense_by_types(raw, "mlp_layer_types", config.num_layers, where, unsaid=[0])
    first = whole(raw, "first_k_dense_replace", where, len(dense_layers), least=0)
    if dense_layers != frozenset(range(first)) and raw.get("first_k_dense_replace") is not None:
        raise NotComputedHere(
            f"{where}: first_k_dense_replace must say what mlp_layer_types says, or without it 1, got {first}; nearest thing "
            "that works: mlp_layer_types alone"
        )
    biased, width = flag(raw, "attention_bias", where), whole(raw, "moe_intermediate_size", where)
    config = replace(
        config,
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=flag(raw, "mlp_bias", where),
        qk_norm=True,
        mtp_layers=whole(raw, MTP_COUNT, where, 0, least=0, most=MAX_LAYERS),
    )
    scaling = number(raw, "router_scaling_factor", where, 2.826)
    experts = ExpertsConfig(
        whole(raw, "num_experts", where),
        width,
        RouterRule(whole(raw, TOP_K, where), "sigmoid", corrected=True, normed=True, scaling=scaling),
        shared_size=whole(raw, "num_shared_experts", where, 1) * width,
        dense_layers=dense_layers,
    )
    return with_experts(config, experts, where, "num_experts")
