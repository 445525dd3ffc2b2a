"""ERNIE 4.5 (`ernie4_5_moe`): a softmax router with corrections, shared experts, and rotated pairs that lie side by side."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdec.models.checkpoints.config_values import MAX_LAYERS, NotComputedHere, flag, number, whole
from specdec.models.config import ModelConfig
from specdec.models.keys.names import by_own_names
from specdec.models.keys.shared import MTP_COUNT, require
from specdec.models.mixtures.fill import MixtureNames
from specdec.models.mixtures.keys import TOP_K, only, read_decoder, with_experts
from specdec.models.mixtures.rules import ExpertsConfig
from specdec.ops.products.routing import RouterRule

NAMES = MixtureNames(
    correction="mlp.moe_statics.e_score_correction_bias", correction_shape="1, E", count_keys="moe_num_experts and hidden_size",
    shared_keys="moe_num_shared_experts and moe_intermediate_size",
    layer_keys="moe_layer_start_index, moe_layer_end_index and moe_layer_interval",
)  # fmt: skip
_ONLY = {"moe_gate": "topk", "moe_gate_act": "softmax", "moe_use_aux_free": True, "use_rmsnorm": True}
_KEYS = (  # moe_capacity counts in training alone
    "moe_capacity moe_intermediate_size moe_k moe_layer_end_index moe_layer_interval moe_layer_start_index moe_norm_min "
    f"moe_num_experts moe_num_shared_experts use_bias {MTP_COUNT} {' '.join(_ONLY)}"
)


def parse_ernie4_5_moe(raw: dict[str, Any], where: str) -> ModelConfig:
    raw = by_own_names(raw, {TOP_K: "moe_k", "num_experts": "moe_num_experts"}, where)
    config = read_decoder({"tie_word_embeddings": True, **raw}, where, _KEYS, eps=1e-5, positions=131072, theta=5e5)
    require(raw, ["moe_num_experts", "moe_k", "moe_intermediate_size"], where)
    only(raw, where, **_ONLY)
    if flag(raw, "use_bias", where):
        raise NotComputedHere(f"{where}: use_bias must be false: no native module has an output layer with a bias")
    width, mtp = whole(raw, "moe_intermediate_size", where), whole(raw, MTP_COUNT, where, 0, least=0, most=MAX_LAYERS)
    config = replace(config, rope=replace(config.rope, interleaved=True), mtp_layers=mtp)
    least_sum = number(raw, "moe_norm_min", where, 1e-12)
    experts = ExpertsConfig(
        whole(raw, "moe_num_experts", where),
        width,
        RouterRule(whole(raw, "moe_k", where), "softmax", corrected=True, normed=True, least_sum=least_sum),
        shared_size=whole(raw, "moe_num_shared_experts", where, 2, least=0) * width,
        kept_float32=True,  # as transformers keeps this family's
        dense_layers=_dense_layers(raw, config.num_layers, where),
    )
    return with_experts(config, experts, where, "moe_num_experts", "moe_k")


def _dense_layers(raw: dict[str, Any], layers: int, where: str) -> frozenset[int]:
    """All but every so many layers from the first with experts to the last one, of which -1 is that of the model."""
    start, step = whole(raw, "moe_layer_start_index", where, 1, least=0), whole(raw, "moe_layer_interval", where, 1)
    end = whole(raw, "moe_layer_end_index", where, -1, least=-1)
    last = layers - 1 if end == -1 else end
    return frozenset(layer for layer in range(layers) if (layer + 1) % step or not start <= layer <= last)
