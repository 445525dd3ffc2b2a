"""config.json of mixtures as they are published: read by our own modules, with weights in fp8 too."""

from typing import Any

import pytest
import torch

from specdec.loading.build import max_captured_cost
from specdec.models.causal_lm import CausalLM
from specdec.models.checkpoints.loader import build
from specdec.models.mixtures.loader import FAMILIES, mixture_layer

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
M2 = dict(
    COMMON, model_type="minimax_m2", attn_type_list=[1] * 62, head_dim=128, hidden_size=3072, intermediate_size=1536,
    layernorm_full_attention_beta=1.0, layernorm_linear_attention_beta=1.0, layernorm_mlp_beta=1.0, mlp_intermediate_size=8192,
    max_position_embeddings=196608, mtp_transformer_layers=1, num_attention_heads=48, num_experts_per_tok=8,
    num_hidden_layers=62, num_key_value_heads=8, num_local_experts=256, num_mtp_modules=3, qk_norm_type="per_layer",
    rms_norm_eps=1e-06, rope_theta=5000000, rotary_dim=64, router_jitter_noise=0.0, scoring_func="sigmoid",
    shared_intermediate_size=0, shared_moe_mode="sigmoid", sliding_window=None, use_mtp=True, use_qk_norm=True,
    use_routing_bias=True, vocab_size=200064,
)  # fmt: skip
ERNIE = dict(
    COMMON, model_type="ernie4_5_moe", hidden_size=2560, intermediate_size=12288, max_position_embeddings=131072,
    moe_capacity=[64, 64, 64], moe_gate="topk", moe_intermediate_size=1536, moe_k=6, moe_layer_end_index=27,
    moe_layer_interval=1, moe_layer_start_index=1, moe_num_experts=64, moe_num_shared_experts=2, moe_use_aux_free=True,
    num_attention_heads=20, num_hidden_layers=28, num_key_value_heads=4, num_nextn_predict_layers=1, rms_norm_eps=1e-05,
    rope_theta=500000.0, use_bias=False, vocab_size=103424, head_dim=128,
)  # fmt: skip
HY3 = dict(
    COMMON, model_type="hy_v3", enable_attention_fp32_softmax=False, enable_lm_head_fp32=True, enable_moe_fp32_combine=False,
    expert_hidden_dim=1536, first_k_dense_replace=1, head_dim=128, hidden_size=4096, intermediate_size=13312,
    max_position_embeddings=262144, moe_intermediate_size=1536, moe_router_enable_expert_bias=True, moe_router_use_sigmoid=True,
    num_attention_heads=64, num_experts=192, num_experts_per_tok=8, num_hidden_layers=80, num_key_value_heads=8,
    num_nextn_predict_layers=1, num_shared_experts=1, qk_norm=True, rms_norm_eps=1e-05,
    rope_parameters={"rope_theta": 11158840.0, "rope_type": "default"}, route_norm=True, router_scaling_factor=2.826,
    eod_token_id=2, use_grouped_mm=False, vocab_size=120832,
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
        (QWEN3 | {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True}, (128, 8, 768, 0, 0)),
        (M2, (256, 8, 1536, 0, 0)),
        (ERNIE, (64, 6, 1536, 3072, 1)),
        (HY3, (192, 8, 1536, 1536, 1)),
    ],
    ids=lambda v: v["model_type"] if isinstance(v, dict) else "",
)
def test_the_published_config_is_understood(raw: dict[str, Any], numbers: tuple[int, ...]) -> None:
    """Keeps out: a strict reader that refuses what it was written for."""
    config = FAMILIES[raw["model_type"]].parse(raw, "config.json")
    experts = config.experts
    assert experts is not None
    found = (experts.count, experts.router.top_k, experts.intermediate_size, experts.shared_size, len(experts.dense_layers))
    thetas = {"minimax_m2": 5e6, "ernie4_5_moe": 5e5, "hy_v3": 11158840.0}
    assert found == numbers and config.rope.theta == thetas.get(config.family, 1e6)
    assert config.rope.rotated == (64 if raw in (AIR, M2) else 0)
    assert config.head_dim == 128 and {kind.window for kind in config.layer_kinds} == {None}


def test_a_chunk_costs_what_its_tokens_are_multiplied_with() -> None:
    """Keeps out: prompts that no graph captures, because experts count whom nobody chose; and chunks cut short, because an
    expert's width counts alone."""
    config = FAMILIES["qwen3_moe"].parse(QWEN3, "config.json")
    assert config.width_of_mlp == 8 * 768 and FAMILIES["glm4_moe"].parse(AIR, "config.json").width_of_mlp == pytest.approx(
        (10944 + 45 * 9 * 1408) / 46
    )
    model = build(lambda: CausalLM(config, 16, mixture_layer), torch.device("meta"), torch.bfloat16)
    billions = sum(p.numel() for p in model.parameters()) / 1e9
    assert 30 < billions < 31 and max_captured_cost(model, None) > 4096


@pytest.mark.parametrize("fmt", ["e4m3", "float8_e4m3fn"])
def test_fp8_leaves_out_routers_alone(fmt: str) -> None:
    """Qwen3-30B-A3B-FP8's scheme, and MiniMax-M2's word for the format.  Keeps out: a router's name that fits the gates of
    experts, too.
    """
    config = FAMILIES["qwen3_moe"].parse(QWEN3 | {"quantization_config": FP8 | {"fmt": fmt}}, "config.json")
    assert config.quantization is not None

    def is_quantised(name: str) -> bool:
        assert config.quantization is not None
        return config.quantization.format_of(name, lambda _: True) is not None

    assert not is_quantised("model.layers.1.mlp.gate") and not is_quantised("lm_head")
    assert all(is_quantised(f"model.layers.{layer}.mlp.experts.5.gate_proj") for layer in (0, 1, 11))
    assert is_quantised("model.layers.1.self_attn.q_proj")


@pytest.mark.parametrize(
    ("raw", "key", "wrong"),
    [
        (M2, "attn_type_list", [1] * 61 + [0]), (M2, "shared_moe_mode", "softmax"), (M2, "layernorm_mlp_beta", 2.0),
        (M2, "norm_topk_prob", False), (M2, "num_mtp_modules", "3"), (M2, "use_mtp", 1), (M2, "mlp_intermediate_size", 0),
        (ERNIE, "moe_gate", "topk_fused"), (ERNIE, "moe_use_aux_free", False), (ERNIE, "use_rmsnorm", False),
        (QWEN3, "shared_expert_intermediate_size", 768), (QWEN3, "partial_rotary_factor", 0.5),
        (HY3, "first_k_dense_replace", 2), (HY3, "route_norm", False), (HY3, "moe_router_use_sigmoid", False),
        (HY3, "use_grouped_mm", 1), (HY3, "expert_hidden_dim", 768), (HY3, "enable_lm_head_fp32", "yes"),
    ],
)  # fmt: skip
def test_a_published_key_that_says_something_else_is_named(raw: dict[str, Any], key: str, wrong: Any) -> None:
    """Keeps out: a key that is let through whatever it says, because published files happen to have it."""
    with pytest.raises(ValueError, match=f"config.json: .*{key}"):
        FAMILIES[raw["model_type"]].parse(raw | {key: wrong}, "config.json")
