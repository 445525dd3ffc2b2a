"""MiniMax-M2 (`minimax_m2`): a sigmoid router with corrections in every layer; norms that see all heads of a token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdec.models.checkpoints.config_values import MAX_LAYERS, flag, number, whole
from specdec.models.config import ModelConfig
from specdec.models.keys.names import by_own_names
from specdec.models.keys.shared import require
from specdec.models.mixtures.families.mixtral import FUSED, NAMES
from specdec.models.mixtures.keys import TOP_K, only, read_decoder, with_experts
from specdec.models.mixtures.rules import ExpertsConfig
from specdec.ops.products.routing import RouterRule

_ONLY = {"use_qk_norm": True, "use_routing_bias": True, "scoring_func": "sigmoid", "qk_norm_type": "per_layer"} | {
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "norm_topk_prob": True,
    "sliding_window": None,
}
_BETAS = ("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta")
_UNUSED = ("mlp_intermediate_size", "mtp_transformer_layers")  # sizes of parts that MiniMax-M2 has not
_KEYS = " ".join(
    (*_ONLY, *_BETAS, *_UNUSED, "attn_type_list num_local_experts num_mtp_modules rotary_dim router_jitter_noise use_mtp")
)

__all__ = ["FUSED", "NAMES", "parse_minimax_m2"]


def parse_minimax_m2(raw: dict[str, Any], where: str) -> ModelConfig:
    raw = by_own_names(raw, {"num_experts": "num_local_experts"}, where)
    width = whole(raw, "head_dim", where, 128)
    share = whole(raw, "rotary_dim", where, width) / width  # counts where no partial_rotary_factor is there
    config = read_decoder(raw, where, _KEYS, positions=196608, theta=5e6, head_dim=128, rotated=share)
    only(raw, where, **_ONLY, **dict.fromkeys(_BETAS, 1.0), attn_type_list=[1] * config.num_layers)  # 1: softmax
    for key in _UNUSED:
        whole(raw, key, where, 1)
    flag(raw, "use_mtp", where)
    mtp_layers = whole(raw, "num_mtp_modules", where, 0, least=0, most=MAX_LAYERS)
    require(raw, ["num_local_experts", TOP_K], where)
    number(raw, "router_jitter_noise", where, 0.0, or_zero=True)  # of training alone
    rule = RouterRule(whole(raw, TOP_K, where), "sigmoid", corrected=True, normed=True)
    experts = ExpertsConfig(whole(raw, "num_local_experts", where), config.intermediate_size, rule)
    return with_experts(replace(config, norms_all_heads=True, mtp_layers=mtp_layers), experts, where, "num_local_experts")
