"""config.json of targets with Mamba-2 layers as they are published: every key is known, and sizes are those of the models."""

from collections import Counter
from typing import Any

import pytest
import torch

from specdec.models.checkpoints.frame import empty
from specdec.models.registry import family_of

SHARED: dict[str, Any] = dict(attention_bias=False, attention_dropout=0.0, initializer_range=0.02, torch_dtype="bfloat16",
                              transformers_version="4.55.4", use_cache=True)  # fmt: skip
NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
SUPER = "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
NEMOTRON: dict[str, Any] = SHARED | dict(
    architectures=["NemotronHForCausalLM"], auto_map={"AutoConfig": "configuration_nemotron_h.NemotronHConfig"}, bos_token_id=1,
    chunk_size=128, conv_kernel=4, eos_token_id=2, expand=2, head_dim=128, hidden_dropout=0.0, hidden_size=2688,
    hybrid_override_pattern=NANO, intermediate_size=1856, layer_norm_epsilon=1e-05, mamba_head_dim=64,
    mamba_hidden_act="silu", mamba_num_heads=64, mamba_proj_bias=False, mamba_ssm_cache_dtype="float32",
    max_position_embeddings=262144, mlp_bias=False, mlp_hidden_act="relu2", model_type="nemotron_h",
    moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712, n_group=1, n_groups=8, n_routed_experts=128,
    n_shared_experts=1, norm_eps=1e-05, norm_topk_prob=True, num_attention_heads=32, num_experts_per_tok=6,
    num_hidden_layers=52, num_key_value_heads=2, num_logits_to_keep=1, pad_token_id=0, partial_rotary_factor=1.0,
    rescale_prenorm_residual=True, residual_in_fp32=False, rope_theta=10000, routed_scaling_factor=2.5, sliding_window=None,
    ssm_state_size=128, tie_word_embeddings=False, time_step_floor=0.0001, time_step_max=0.1, time_step_min=0.001,
    topk_group=1, use_bias=False, use_conv_bias=True, use_mamba_kernels=True, vocab_size=131072,
)  # fmt: skip
LATENT: dict[str, Any] = NEMOTRON | dict(
    hidden_size=4096, num_hidden_layers=88, hybrid_override_pattern=SUPER, mamba_num_heads=128, n_routed_experts=512,
    num_experts_per_tok=22, moe_intermediate_size=2688, moe_shared_expert_intermediate_size=5376, moe_latent_size=1024,
    routed_scaling_factor=5.0, num_nextn_predict_layers=1, mtp_hybrid_override_pattern="*E", eos_token_id=[2, 11],
)  # fmt: skip
GRANITE: dict[str, Any] = SHARED | dict(
    architectures=["GraniteMoeHybridForCausalLM"], attention_multiplier=0.0078125, bos_token_id=100257,
    embedding_multiplier=12, eos_token_id=100257, hidden_act="silu", hidden_size=1536, intermediate_size=512,
    layer_types=["attention" if layer in (5, 15, 25, 35) else "mamba" for layer in range(40)], logits_scaling=6,
    mamba_chunk_size=256, mamba_conv_bias=True, mamba_d_conv=4, mamba_d_head=64, mamba_d_state=128, mamba_expand=2,
    mamba_n_groups=1, mamba_n_heads=48, mamba_proj_bias=False, max_position_embeddings=131072,
    model_type="granitemoehybrid", normalization_function="rmsnorm", num_attention_heads=12, num_experts_per_tok=6,
    num_hidden_layers=40, num_key_value_heads=4, num_local_experts=64, output_router_logits=False, pad_token_id=100256,
    position_embedding_type="nope", residual_multiplier=0.22, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=10000,
    router_aux_loss_coef=0.0, shared_intermediate_size=1024, tie_word_embeddings=True, vocab_size=100352,
)  # fmt: skip
FALCON: dict[str, Any] = SHARED | dict(
    architectures=["FalconH1ForCausalLM"], attention_in_multiplier=1.0, attention_out_multiplier=0.9375,
    attn_layer_indices=None, embedding_multiplier=5.656854249492381, head_dim=64, hidden_act="silu", hidden_size=1024,
    intermediate_size=2048, key_multiplier=0.39062499999999994, lm_head_multiplier=0.0390625, mamba_chunk_size=128,
    mamba_conv_bias=True, mamba_d_conv=4, mamba_d_head=64, mamba_d_ssm=1536, mamba_d_state=128, mamba_expand=2,
    mamba_n_groups=1, mamba_n_heads=24, mamba_norm_before_gate=False, mamba_proj_bias=False, mamba_rms_norm=False,
    mamba_use_mlp=True, max_position_embeddings=16384, mlp_bias=False, mlp_multipliers=[0.8838834764831844, 0.5859375],
    model_type="falcon_h1", num_attention_heads=8, num_hidden_layers=36, num_key_value_heads=2, projectors_bias=False,
    rms_norm_eps=1e-5, rope_scaling=None, rope_theta=100000000000.0, ssm_in_multiplier=1.25, ssm_out_multiplier=0.2357,
    ssm_multipliers=[0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738], tie_word_embeddings=False,
    vocab_size=32784,
)  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "kinds", "channels", "state", "billions"),
    [
        (NEMOTRON, {"recurrent": 23, "without a memory": 23, "full": 6}, 6144, 64 * 64 * 128, 31.6),
        (LATENT, {"recurrent": 40, "without a memory": 40, "full": 8}, 10240, 128 * 64 * 128, 120),
        (GRANITE, {"recurrent": 36, "full": 4}, 3328, 48 * 64 * 128, 6.9),
        (FALCON, {"full, and recurrent": 36}, 1792, 24 * 64 * 128, 0.52),
    ],
    ids=["nemotron", "latent", "granite", "falcon"],
)
def test_published_configs_are_read(
    raw: dict[str, Any], kinds: dict[str, int], channels: int, state: int, billions: float
) -> None:
    """Keeps out: a key that every file has and nobody reads; layers of another size than those of the published weights."""
    family = family_of(raw["model_type"])
    assert family is not None
    config = family.parse(raw, "here")
    assert Counter(map(str, config.layer_kinds)) == kinds and config.dtype == "bfloat16"
    assert config.recurrent is not None and config.recurrent.channels == channels
    assert config.recurrent.state_bytes(torch.bfloat16) == 4 * state + 2 * 3 * channels
    weights = sum(x.numel() for x in empty(family, config).parameters())
    assert weights / 1e9 == pytest.approx(billions, rel=0.02)
