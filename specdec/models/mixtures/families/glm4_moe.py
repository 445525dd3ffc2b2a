"""GLM-4.5 to 4.7 (`glm4_moe`): DeepSeek V3's mixtures under ordinary heads, of which a part is turned."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specdec.models.checkpoints.config_values import MAX_LAYERS, flag, whole
from specdec.models.config import ModelConfig
from specdec.models.deepseek.config import OTHER_NAMES, parse_experts
from specdec.models.keys.names import by_own_names
from specdec.models.keys.shared import MTP_COUNT
from specdec.models.mixtures.fill import USUAL as NAMES
from specdec.models.mixtures.keys import read_decoder, with_experts

KEYS = (
    "attention_bias first_k_dense_replace moe_intermediate_size n_group n_routed_experts n_shared_experts norm_topk_prob "
    f"routed_scaling_factor topk_group use_qk_norm {MTP_COUNT}"
)
_UNSAID = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}

__all__ = ["NAMES", "parse_glm4_moe"]


def parse_glm4_moe(raw: dict[str, Any], where: str) -> ModelConfig:
    raw = {**_UNSAID, **by_own_names(raw, OTHER_NAMES, where)}
    config = read_decoder(raw, where, KEYS, eps=1e-5, positions=131072, rotated=0.5)
    config = replace(
        config,
        qkv_bias=flag(raw, "attention_bias", where),
        qk_norm=flag(raw, "use_qk_norm", where),
        mtp_layers=whole(raw, MTP_COUNT, where, 0, least=0, most=MAX_LAYERS),  # transformers' class says 1, and has none
    )
    experts = parse_experts(raw, where, whole(raw, "first_k_dense_replace", where, 1, least=0))
    return with_experts(config, experts, where, "n_routed_experts")
