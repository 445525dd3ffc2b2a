"""Mixtral: the weights of the chosen experts are a softmax over these, and every layer is a mixture."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdec.attention.kinds import FULL, LayerKind
from specdec.models.checkpoints.config_values import number, whole
from specdec.models.config import ModelConfig
from specdec.models.keys.names import by_own_names
from specdec.models.keys.shared import require, sliding_window
from specdec.models.mixtures.fill import MixtureNames
from specdec.models.mixtures.keys import TOP_K, read_decoder, with_experts
from specdec.models.mixtures.rules import ExpertsConfig
from specdec.ops.products.routing import RouterRule

COUNT, SIZES = "num_local_experts and hidden_size", "intermediate_size"
PARTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
NAMES = MixtureNames(
    "block_sparse_moe.gate.weight", "block_sparse_moe.e_score_correction_bias", experts="block_sparse_moe.experts", parts=PARTS,
    count_keys=COUNT, width_keys=SIZES, layer_keys="",
)  # fmt: skip
FUSED = MixtureNames(correction="mlp.e_score_correction_bias", count_keys=COUNT, width_keys=SIZES, layer_keys="")


def parse_mixtral(raw: dict[str, Any], where: str) -> ModelConfig:
    raw = by_own_names(raw, {"num_experts": "num_local_experts"}, where)
    keys = "num_local_experts router_jitter_noise sliding_window"
    config = read_decoder(raw, where, keys, eps=1e-5, positions=131072, theta=1e6)
    require(raw, ["num_local_experts", TOP_K], where)
    number(raw, "router_jitter_noise", where, 0.0, or_zero=True)  # of training alone
    window = sliding_window({"sliding_window": None, **raw}, where)
    kinds = (FULL if window is None else LayerKind(window=window),) * config.num_layers
    rule = RouterRule(whole(raw, TOP_K, where), "softmax", normed=True)
    experts = ExpertsConfig(whole(raw, "num_local_experts", where), config.intermediate_size, rule)
    return with_experts(replace(config, layer_kinds=kinds), experts, where, "num_local_experts")
