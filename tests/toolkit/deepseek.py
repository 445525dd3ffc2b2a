"""Tiny random DeepSeek V2 and V3 targets, written to disk by transformers itself."""

from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from toolkit.models import Zoo, randomise

YARN = dict(
    rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64, beta_fast=32, beta_slow=1,
    mscale=1.0, mscale_all_dim=0.8,
)  # fmt: skip
COMMON = dict(
    vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4,
    max_position_embeddings=256, bos_token_id=0, eos_token_id=None, pad_token_id=None, kv_lora_rank=16, qk_rope_head_dim=8,
    qk_nope_head_dim=12, v_head_dim=16, moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=3,
    first_k_dense_replace=1, rms_norm_eps=1e-5,
)  # fmt: skip
V2, V3 = (DeepseekV2Config, DeepseekV2ForCausalLM), (DeepseekV3Config, DeepseekV3ForCausalLM)
GROUPS = dict(n_group=4, topk_group=2)
# name: (config class, model class), what differs from COMMON
DEEPSEEKS: dict[str, tuple[tuple[Any, Any], dict[str, Any]]] = {
    "v2-lite": (V2, dict(q_lora_rank=None, topk_method="greedy", n_shared_experts=2, norm_topk_prob=False)),
    "v2": (
        V2,
        dict(
            q_lora_rank=20, topk_method="group_limited_greedy", **GROUPS, n_shared_experts=1, routed_scaling_factor=1.7,
            rope_parameters=YARN, norm_topk_prob=False,
        ),
    ),
    "v2-dense-biases": (V2, dict(q_lora_rank=None, first_k_dense_replace=3, attention_bias=True, mlp_bias=True)),
    "v3": (V3, dict(q_lora_rank=20, **GROUPS, routed_scaling_factor=2.5, rope_parameters=YARN, norm_topk_prob=True)),
    "v3-no-q-lora": (
        V3,
        dict(
            q_lora_rank=None, **GROUPS, norm_topk_prob=False, rope_interleave=False, attention_bias=True,
            rope_parameters={**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        ),
    ),
    "v3-dense-tied": (
        V3,
        dict(q_lora_rank=20, first_k_dense_replace=3, tie_word_embeddings=True, num_nextn_predict_layers=0),
    ),
    "v3-wide-latents": (  # wide enough to be kept in 8 bits; dense, because a router turns small errors into large ones
        V3,
        dict(q_lora_rank=20, first_k_dense_replace=3, kv_lora_rank=128, rope_parameters=YARN),
    ),
}  # fmt: skip


def save_deepseek(folder: Path, name: str, **changes: Any) -> Path:
    """A random model of that name, as transformers saves it."""
    (config_class, model_class), own = DEEPSEEKS[name]
    model = model_class(config_class(**{**COMMON, **own, **changes}))
    seed = 50 + list(DEEPSEEKS).index(name)
    randomise(model, seed)
    generator = torch.Generator().manual_seed(seed)
    for buffer in (b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")):
        buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


class DeepseekZoo(Zoo):
    """The Zoo with these targets."""

    def target(self, name: str) -> Path:
        folder = self.root / name
        return folder if folder.is_dir() else save_deepseek(folder, name)
