"""Tiny random targets whose layer kinds have heads of their own: MiMo-V2-Flash and Gemma 4, as transformers saves them.

Windows are small, so that prompts and outputs cross them many times.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from toolkit.models import MORE_TARGETS, scaled

COMMON = dict(
    vocab_size=40, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=1, head_dim=16,
    max_position_embeddings=256, bos_token_id=0, eos_token_id=None, pad_token_id=None, tie_word_embeddings=False,
    sliding_window=6,
)  # fmt: skip
MIMO = dict(
    COMMON, num_hidden_layers=4, layer_types=["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    v_head_dim=12, moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=2, routed_scaling_factor=1.3,
    rope_parameters={
        "full_attention": {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e2, "partial_rotary_factor": 0.5},
    },
)  # fmt: skip
GEMMA = dict(
    COMMON, num_hidden_layers=6, layer_types=["sliding_attention", "full_attention"] * 3, global_head_dim=24,
    num_key_value_heads=4, hidden_size_per_layer_input=0, vocab_size_per_layer_input=40,
    rope_parameters={
        "full_attention": {"rope_type": "proportional", "rope_theta": 5e3, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
    },
)  # fmt: skip
# name: (model_type, its config).  The Gemmas: as 31B, as E2B and as 26B-A4B.
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "mimo": ("mimo_v2_flash", MIMO),
    "gemma": ("gemma4_text", GEMMA | dict(num_global_key_value_heads=1, attention_k_eq_v=True, final_logit_softcapping=9.0)),
    "gemma-small": (
        "gemma4_text",
        GEMMA | dict(num_key_value_heads=1, num_kv_shared_layers=3, use_double_wide_mlp=True, hidden_size_per_layer_input=8),
    ),
    "gemma-mixture": (
        "gemma4_text",
        GEMMA
        | dict(num_global_key_value_heads=2, attention_k_eq_v=True, enable_moe_block=True, num_experts=8)
        | dict(top_k_experts=2, moe_intermediate_size=20),
    ),
    "mimo-alike": ("mimo_v2_flash", MIMO | dict(v_head_dim=16, n_group=4, topk_group=2, attention_bias=True)),
}


def unlike_model(name: str, seed: int | None = None, **changes: Any) -> PreTrainedModel:
    """A random model of that name, whose every weight matters.  changes: of its config."""
    model_type, own = TARGETS[name]
    config = CONFIG_MAPPING[model_type](**own | changes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(list(TARGETS).index(name) if seed is None else seed)
    with torch.no_grad():
        corrections = [(n, b) for n, b in model.named_buffers() if n.endswith(("e_score_correction_bias", "layer_scalar"))]
        for part, weight in (*model.named_parameters(), *corrections):
            noise = _weight_of(part, torch.randn(weight.shape, generator=generator))
            # Gemma multiplies embeddings by 6 here, beside which no layer would count.
            weight.copy_(0.2 * noise if "embed_tokens" in part and name.startswith("gemma") else noise)
    return model


def _weight_of(part: str, noise: Tensor) -> Tensor:
    """Noise made into a weight of that name."""
    if part.endswith("e_score_correction_bias"):
        return 0.1 * noise
    if part.endswith(("layer_scalar", "scale")):
        return 1 + 0.2 * noise
    return 2 * noise if "sinks" in part else scaled(part, noise)


def save_unlike(folder: Path, name: str, seed: int | None = None, **changes: Any) -> Path:
    """The folder with that model, as transformers saves it."""
    unlike_model(name, seed, **changes).save_pretrained(folder)
    return folder


MORE_TARGETS |= {name: partial(save_unlike, name=name) for name in TARGETS}
# With these seeds best logits lie 0.015 above second ones in texts.PROMPTS and 24 tokens after each.
WIDE = {"mimo": 25, "gemma": 14, "gemma-small": 38, "gemma-mixture": 6}
MORE_TARGETS |= {f"{name} wide": partial(save_unlike, name=name, seed=seed) for name, seed in WIDE.items()}
