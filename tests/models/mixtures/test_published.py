"""config.json of mixtures as they are published: read by our own modules, with weights in fp8 too."""

from typing import Any

import pytest

from specdec.models.mixtures.loader import FAMILIES

COMMON: dict[str, Any] = dict(
    architectures=["X"], attention_dropout=0.0, bos_token_id=1, eos_token_id=2, hidden_act="silu", initializer_range=0.02,
    output_router_logits=False, router_aux_loss_coef=0.001, tie_word_embeddings=False, torch_dtype="bfloat16",
    transformers_version="4.51.0", use_cache=True,
)  # fmt: skip
QWEN3 = dict(
    COMMON, model_type="qwen3_moe", attention_bias=False, decoder_sparse_step=1, head_dim=128, hidden_size=2048,
    intermediate_size=6144, max_position_embeddings=40960, max_window_layers=48, mlp_only_layers=[], moe_intermediate_size=768,
    norm_topk_prob=True, num_attention_heads=32, num_experts=128, num_experts_per_tok=8, num_hidden_layers=48,
    num_key_value_heads=4, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=1000000.0, sliding_window=None,
    use_sliding_window=False, vocab_size=151936,
)  # fmt: skip
QWEN15 = dict(
    COMMON, model_type="qwen2_moe", decoder_sparse_step=1, hidden_size=2048, intermediate_size=5632,
    max_position_embeddings=8192, max_window_layers=21, moe_intermediate_size=1408, norm_topk_prob=False,
    num_attention_heads=16, num_experts=60, num_experts_per_tok=4, num_hidden_layers=24, num_key_value_heads=16,
    rms_norm_eps=1e-06, rope_theta=1000000.0, shared_expert_intermediate_size=5632, sliding_window=32768,
    use_sliding_window=False, vocab_size=151936,
)  # fmt: skip
MIXTRAL = dict(
    COMMON, model_type="mixtral", hidden_size=4096, intermediate_size=14336, max_position_embeddings=32768,
    num_attention_heads=32, num_experts_per_tok=2, num_hidden_layers=32, num_key_value_heads=8, num_local_experts=8,
    rms_norm_eps=1e-05, rope_theta=1000000.0, sliding_window=None, vocab_size=32000,
)  # fmt: skip
AIR = dict(
    COMMON, model_type="glm4_moe", attention_bias=True, head_dim=128, hidden_size=4096, partial_rotary_factor=0.5,
    intermediate_size=10944, max_position_embeddings=131072, moe_intermediate_size=1408, norm_topk_prob=True,
    num_attention_heads=96, n_group=1, topk_group=1, n_routed_experts=128, n_shared_experts=1, routed_scaling_factor=1.0,
    num_experts_per_tok=8, first_k_dense_replace=1, num_hidden_layers=46, num_key_value_heads=8, rms_norm_eps=1e-05,
    rope_scaling=None, rope_theta=1000000, num_nextn_predict_layers=1, use_qk_norm=False, vocab_size=151552,
)  # fmt: skip
FP8 = dict(
    quant_method="fp8", activation_scheme="dynamic", fmt="e4m3", weight_block_size=[128, 128],
    modules_to_not_convert=["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(48))],
)  # fmt: skip


# The config, how many experts, how many of a token, the width of one, that of the shared ones, layers without experts.
@pytest.mark.parametrize(
    ("raw", "numbers"),
    [
        (QWEN3, (128, 8, 768, 0, 0)),
        (QWEN15, (60, 4, 1408, 5632, 0)),
        (MIXTRAL, (8, 2, 14336, 0, 0)),
        (AIR, (128, 8, 1408, 1408, 1)),
    ],
    ids=lambda v: v["model_type"] if isinstance(v, dict) else "",
)
def test_the_published_config_is_understood(raw: dict[str, Any], numbers: tuple[int, ...]) -> None:
    """Keeps out: a strict reader that refuses what it was written for."""
    config = FAMILIES[raw["model_type"]].parse(raw, "config.json")
    experts = config.experts
    assert experts is not None
    found = (experts.count, experts.router.top_k, experts.intermediate_size, experts.shared_size, len(experts.dense_layers))
    assert found == numbers and config.rope.theta == 1e6 and config.rope.rotated == (64 if raw is AIR else 0)
    assert config.head_dim == 128 and {kind.window for kind in config.layer_kinds} == {None}


def test_fp8_leaves_out_routers_alone() -> None:
    """Qwen3-30B-A3B-FP8's scheme.  Keeps out: a router's name that fits the gates of experts, too."""
    config = FAMILIES["qwen3_moe"].parse(QWEN3 | {"quantization_config": FP8}, "config.json")
    assert config.quantization is not None

    def is_quantised(name: str) -> bool:
        assert config.quantization is not None
        return config.quantization.format_of(name, lambda _: True) is not None

    assert not is_quantised("model.layers.1.mlp.gate") and not is_quantised("lm_head")
    assert all(is_quantised(f"model.layers.{layer}.mlp.experts.5.gate_proj") for layer in (0, 1, 11))
    assert is_quantised("model.layers.1.self_attn.q_proj")
