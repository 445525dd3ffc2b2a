"""Targets whose layer kinds have heads of their own, against transformers in float32: logits of whole rows without a cache.

Keeps out: heads, a theta, a rotated part, a scale or sinks of another kind of layer; an absent key that means something else
than in transformers.
"""

from pathlib import Path
from typing import Any

import pytest
from toolkit.recurrent.checks import expect_equal_logits
from toolkit.unlike.targets import TARGETS, unlike_model

# name: (target, what differs from it)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in TARGETS},
    "no scale": ("mimo", dict(attention_value_scale=None, norm_topk_prob=False, routed_scaling_factor=None)),
    "unsaid kinds": ("mimo", dict(layer_types=None, num_hidden_layers=7, mlp_layer_types=["sparse"] * 3 + ["dense"] * 4)),
    "by size": ("mimo", dict(sliding_window_size=3, num_key_value_heads=2)),
    "unsaid turning": ("mimo", dict(rope_parameters=None, head_dim=24)),
    "all windowed": ("mimo", dict(layer_types=["sliding_attention"] * 4)),
    "biased": ("gemma", dict(attention_bias=True, global_head_dim=16)),
    "unsaid kinds of Gemma": ("gemma", dict(layer_types=None, num_hidden_layers=8, rope_parameters=None, head_dim=12)),
    "tied": ("gemma", dict(tie_word_embeddings=True)),
    "keys of their own": ("gemma", dict(attention_k_eq_v=False)),
    "all of it": (
        "gemma-mixture",
        dict(
            num_kv_shared_layers=2,
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=4,
            use_bidirectional_attention="vision",
        ),
    ),
    "all full": ("mimo", dict(layer_types=["full_attention"] * 4)),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    target, changes = CASES[name]
    expect_equal_logits(unlike_model(target, seed=7, **changes), tmp_path, 4e-5)
