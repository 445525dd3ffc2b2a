"""Qwen's hybrids against transformers, in float32: logits of whole rows, by attention without a cache.

Keeps out: rows of fused matrices in another order, a gate of the wrong head, a norm whose weight is not above one, a head that
is turned as a whole, an absent key that means something else than in transformers.
"""

from pathlib import Path
from typing import Any

import pytest
from toolkit.recurrent.checks import expect_equal_logits
from toolkit.recurrent.targets import FAMILIES, hybrid_model

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 8}
# name: (family, what differs from the toolkit's tiny targets)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "next-dense-layers": ("qwen3_next", dict(decoder_sparse_step=2, norm_topk_prob=False, tie_word_embeddings=True)),
    "next-no-experts": ("qwen3_next", dict(num_experts=0, attention_bias=True, num_key_value_heads=4)),
    "next-unsaid-kinds": ("qwen3_next", dict(layer_types=None, linear_num_key_heads=4, linear_key_head_dim=12)),
    "tied-biased": ("qwen3_5_text", dict(tie_word_embeddings=True, attention_bias=True, num_key_value_heads=1)),
    "interval": ("qwen3_5_text", dict(layer_types=None, full_attention_interval=2, linear_conv_kernel_dim=2)),
    "one-key-head": ("qwen3_5_text", dict(linear_num_key_heads=1, linear_value_head_dim=4, rope_parameters=None)),
    "yarn": ("qwen3_5", dict(rope_parameters={**YARN, "mrope_section": [1, 1, 2], "mrope_interleaved": True})),
    "moe-tied": ("qwen3_5_moe", dict(tie_word_embeddings=True, num_experts_per_tok=3)),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    family, changes = CASES[name]
    expect_equal_logits(hybrid_model(family, seed=7, **changes), tmp_path)
