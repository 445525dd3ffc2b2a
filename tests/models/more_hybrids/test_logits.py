"""Hybrids of other families than Qwen's against transformers, in float32: logits of whole rows, by attention without a cache.

Keeps out: rows of fused matrices in another order, a gate of another part, a norm under another norm's name, an absent key that
means something else than in transformers.
"""

from pathlib import Path
from typing import Any

import pytest
from toolkit.recurrent.checks import expect_equal_logits
from toolkit.recurrent.more_targets import MORE, more_model

# name: (family, what differs from the toolkit's tiny targets)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in MORE},
    "biased": ("lfm2", dict(conv_bias=True, conv_L_cache=4, tie_word_embeddings=False, num_key_value_heads=4)),
    "by numbers": ("lfm2", dict(layer_types=None, full_attn_idxs=[1, 3], block_ffn_dim_multiplier=1.3, conv_L_cache=2)),
    "as wide": ("lfm2", dict(block_auto_adjust_ff_dim=False, norm_eps=1e-3)),
    "no corrections": ("lfm2_moe", dict(use_expert_bias=False, norm_topk_prob=False, conv_bias=True)),
    "turned": ("olmo_hybrid", dict(rope_parameters={"rope_type": "default", "rope_theta": 500.0}, attention_bias=True)),
    "weaker": ("olmo_hybrid", dict(linear_allow_neg_eigval=False, num_key_value_heads=4, linear_conv_kernel_dim=2)),
    "unsaid sizes": (
        "olmo_hybrid",
        dict(layer_types=None, tie_word_embeddings=True, num_hidden_layers=3)
        | dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")),
    ),
    "latent queries": ("kimi_linear", dict(q_lora_rank=12, moe_renormalize=False)),
    "grouped": ("kimi_linear", dict(num_experts=8, num_expert_group=4, topk_group=2, num_shared_experts=2)),
    "all dense": ("kimi_linear", dict(mlp_layer_types=["dense"] * 4, qk_rope_head_dim=6, v_head_dim=4)),
    "other heads": (
        "kimi_linear",
        dict(
            linear_attn_config=dict(head_dim=12, num_heads=2, short_conv_kernel_size=3),
            layer_types=["linear_attention"] * 3 + ["full_attention"],
        ),
    ),
    "no mixtures": ("lfm2_moe", dict(num_dense_layers=4)),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    family, changes = CASES[name]
    expect_equal_logits(more_model(family, seed=7, **changes), tmp_path, 4e-5)  # in float32 either is 2e-5 off
