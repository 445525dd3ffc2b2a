"""Targets with Mamba-2 layers against transformers, in float32: logits of whole rows, by attention without a cache.

Keeps out: rows of fused matrices in another order, a group of the wrong head, a norm over all groups or before the gate, a
multiplier in the wrong place or left out, an absent key that means something else than in transformers.
"""

from pathlib import Path
from typing import Any

import pytest
from toolkit.recurrent.checks import expect_equal_logits
from toolkit.recurrent.mamba_targets import FAMILIES, mamba_model

# name: (target, what differs from the toolkit's)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "granite-biased": (
        "granitemoehybrid",
        dict(attention_bias=True, mamba_proj_bias=True, mamba_conv_bias=False, mamba_n_groups=1, num_key_value_heads=4),
    ),
    "granite-no-mamba": ("granite dense", dict(layer_types=["attention"] * 4)),
    "granite-tied": (
        "granitemoehybrid",
        dict(tie_word_embeddings=True, mamba_n_groups=4, mamba_d_conv=2, residual_multiplier=1),
    ),
    "nemotron-dense": (
        "nemotron_h",
        dict(
            layers_block_type=["attention", "mlp", "mamba", "mlp"], use_bias=True, use_conv_bias=False, n_groups=4, head_dim=16
        ),
    ),
    "nemotron-wide-experts": (
        "nemotron_h",
        dict(moe_latent_size=None, n_group=2, topk_group=1, n_routed_experts=8, norm_topk_prob=False, n_groups=1),
    ),
    "bamba-biased": (
        "bamba",
        dict(attn_layer_indices=[0, 2], attention_bias=True, mlp_bias=True, mamba_proj_bias=True, tie_word_embeddings=True),
    ),
    "falcon-gate-first": (
        "falcon_h1",
        dict(mamba_rms_norm=True, mamba_norm_before_gate=False, mamba_proj_bias=True, projectors_bias=True, mlp_bias=True),
    ),
    "falcon-norm-first": (
        "falcon_h1",
        dict(mamba_rms_norm=True, attention_bias=True, mamba_n_groups=4, mamba_conv_bias=False, tie_word_embeddings=True),
    ),
    "falcon-expanded": (
        "falcon_h1",
        dict(mamba_d_ssm=None, mamba_d_head="auto", mlp_multipliers=None, ssm_multipliers=None, mamba_n_groups=1),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    family, changes = CASES[name]
    expect_equal_logits(mamba_model(family, seed=7, **changes), tmp_path)
