"""OLMoE (`olmoe`): a softmax router in every layer, under heads whose norms see all heads of a token."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdec.models.checkpoints.config_values import flag, whole
from specdec.models.config import ModelConfig
from specdec.models.keys.names import by_own_names
from specdec.models.keys.shared import require
from specdec.models.mixtures.fill import MixtureNames
from specdec.models.mixtures.keys import TOP_K, only, read_decoder, with_experts
from specdec.models.mixtures.rules import ExpertsConfig
from specdec.ops.products.routing import RouterRule

NAMES = MixtureNames(count_keys="num_experts and hidden_size", width_keys="intermediate_size", layer_keys="")


def parse_olmoe(raw: dict[str, Any], where: str) -> ModelConfig:
    raw = by_own_names(raw, {"num_local_experts": "num_experts"}, where)
    config = read_decoder(raw, where, "attention_bias clip_qkv norm_topk_prob num_experts", eps=1e-5, positions=4096)
    only(raw, where, clip_qkv=None)
    require(raw, ["num_experts", TOP_K], where)
    biased = flag(raw, "attention_bias", where)
    rule = RouterRule(whole(raw, TOP_K, where), "softmax", normed=flag(raw, "norm_topk_prob", where))
    experts = ExpertsConfig(whole(raw, "num_experts", where), config.intermediate_size, rule)
    return with_experts(replace(config, qkv_bias=biased, o_bias=biased, norms_all_heads=True), experts, where, "num_experts")
