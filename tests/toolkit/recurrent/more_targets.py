"""Tiny random hybrids of other families than Qwen's, written to disk by transformers itself, and kept by name in the zoo.

Weights make every part matter: norms lie off 1, biases and routers' corrections off 0, and decays from none to almost all.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    PreTrainedModel,
)

from toolkit.models import MORE_TARGETS, scaled

COMMON: dict[str, Any] = dict(
    vocab_size=40, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
    max_position_embeddings=256, bos_token_id=0, eos_token_id=None, pad_token_id=None,
)  # fmt: skip
LFM2: dict[str, Any] = dict(
    layer_types=["conv", "conv", "full_attention", "conv"], rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    block_multiple_of=8,
)  # fmt: skip
LFM2_MOE: dict[str, Any] = dict(
    LFM2, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, num_dense_layers=1, routed_scaling_factor=1.5,
)  # fmt: skip
OLMO: dict[str, Any] = dict(
    layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"], linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12, linear_allow_neg_eigval=True,
    tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": None},
)  # fmt: skip
KIMI: dict[str, Any] = dict(
    num_key_value_heads=4, moe_intermediate_size=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
    num_experts=6, num_experts_per_token=2, num_shared_experts=1, routed_scaling_factor=1.5, model_max_length=256,
    linear_attn_config=dict(
        head_dim=8, num_heads=4, short_conv_kernel_size=4, full_attn_layers=[3], kda_layers=[1, 2, 4]  # counted from 1
    ),
)  # fmt: skip
# By model type: the config's class, the model's, what differs from COMMON, the seed.
MORE: dict[str, tuple[Any, Any, dict[str, Any], int]] = {
    "lfm2": (Lfm2Config, Lfm2ForCausalLM, LFM2, 0),
    "lfm2_moe": (Lfm2MoeConfig, Lfm2MoeForCausalLM, {k: v for k, v in LFM2_MOE.items() if k != "block_multiple_of"}, 1),
    "olmo_hybrid": (OlmoHybridConfig, OlmoHybridForCausalLM, OLMO, 2),
    "kimi_linear": (KimiLinearConfig, KimiLinearForCausalLM, KIMI, 3),
}


def more_model(family: str, seed: int | None = None, **changes: Any) -> PreTrainedModel:
    """The random model itself, in float32.  changes: of its config."""
    config_class, model_class, own, usual = MORE[family]
    model: PreTrainedModel = model_class(config_class(**{**COMMON, **own, **changes})).float().eval()
    generator = torch.Generator().manual_seed(usual if seed is None else seed)
    with torch.no_grad():
        corrections = [(n, b) for n, b in model.named_buffers() if n.endswith(("expert_bias", "e_score_correction_bias"))]
        for name, weight in (*model.named_parameters(), *corrections):
            weight.copy_(_weight_of(name, torch.randn(weight.shape, generator=generator)))
    return model


def _weight_of(name: str, noise: Tensor) -> Tensor:
    """Noise made into a weight of that name."""
    if name.endswith("A_log"):
        return noise.clamp(-2, 1)
    return 0.1 * noise if name.endswith(("expert_bias", "e_score_correction_bias")) else scaled(name, noise)


def save_more(folder: Path, family: str, seed: int | None = None, **changes: Any) -> Path:
    """The folder with a random model of that family, as transformers saves it."""
    more_model(family, seed, **changes).save_pretrained(folder)
    return folder


# Of the least widths that kernels take.  With these seeds best logits lie 0.015 above second ones in texts.PROMPTS and 24
# tokens after each.
WIDE: dict[str, tuple[int, dict[str, Any]]] = {
    "lfm2": (20, {}),
    "olmo_hybrid": (13, dict(linear_key_head_dim=16, linear_value_head_dim=32)),
    "kimi_linear": (21, dict(linear_attn_config=KIMI["linear_attn_config"] | {"head_dim": 16})),
}
MORE_TARGETS |= {family: partial(save_more, family=family) for family in MORE}
MORE_TARGETS |= {
    f"{family} wide": partial(save_more, family=family, seed=seed, **changes) for family, (seed, changes) in WIDE.items()
}
