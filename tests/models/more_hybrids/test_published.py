"""config.json of hybrids as they are published."""

from typing import Any

import pytest
import torch

from specdec.models.registry import family_of

LFM2: dict[str, Any] = dict(
    architectures=["Lfm2ForCausalLM"], block_auto_adjust_ff_dim=True, block_dim=2048, block_ff_dim=12288,
    block_ffn_dim_multiplier=1.0, block_mlp_init_scale=1.0, block_multiple_of=256, block_norm_eps=1e-05,
    block_out_init_scale=1.0, block_use_swiglu=True, block_use_xavier_init=True, bos_token_id=1, conv_L_cache=3,
    conv_bias=False, conv_dim=2048, conv_dim_out=2048, conv_use_xavier_init=True, eos_token_id=7,
    full_attn_idxs=[2, 5, 8, 10, 12, 14], hidden_size=2048, initializer_range=0.02, max_position_embeddings=128000,
    model_type="lfm2", norm_eps=1e-05, num_attention_heads=32, num_heads=32, num_hidden_layers=16, num_key_value_heads=8,
    pad_token_id=0, rope_theta=1000000.0, torch_dtype="bfloat16", use_cache=True, use_pos_enc=True, vocab_size=65536,
)  # fmt: skip
ATTEND = (2, 6, 10, 14, 18, 21)
LFM2_MOE: dict[str, Any] = dict(
    architectures=["Lfm2MoeForCausalLM"], bos_token_id=1, conv_L_cache=3, conv_bias=False, dtype="bfloat16", eos_token_id=7,
    hidden_size=2048, intermediate_size=7168, max_position_embeddings=128000, model_type="lfm2_moe", norm_eps=1e-05,
    moe_intermediate_size=1792, norm_topk_prob=True, num_attention_heads=32, num_dense_layers=2, num_experts=32,
    num_experts_per_tok=4, num_hidden_layers=24, num_key_value_heads=8, pad_token_id=0, rope_theta=1000000.0,
    routed_scaling_factor=1.0, use_cache=True, use_expert_bias=True, vocab_size=65536,
    layer_types=["full_attention" if layer in ATTEND else "conv" for layer in range(24)],
)  # fmt: skip
OLMO: dict[str, Any] = dict(
    architectures=["OlmoHybridForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=None, dtype="bfloat16",
    eos_token_id=100257, hidden_act="silu", hidden_size=3840, initializer_range=0.02, intermediate_size=11008,
    layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 8, linear_a_log_max=16.0, linear_a_log_min=0.0,
    linear_allow_neg_eigval=True, linear_conv_kernel_dim=4, linear_dt_init_floor=0.0001, linear_dt_max=0.1, linear_dt_min=0.001,
    linear_key_head_dim=96, linear_num_key_heads=30, linear_num_value_heads=30, linear_value_head_dim=192,
    max_position_embeddings=65536, model_type="olmo_hybrid", num_attention_heads=30, num_hidden_layers=32,
    num_key_value_heads=30, pad_token_id=100277, rms_norm_eps=1e-06, rope_parameters=None, tie_word_embeddings=False,
    use_cache=True, vocab_size=100352,
)  # fmt: skip
KIMI_ATTENDS = [4, 8, 12, 16, 20, 24, 27]
KIMI: dict[str, Any] = dict(
    architectures=["KimiLinearForCausalLM"], auto_map={"AutoConfig": "configuration_kimi.KimiLinearConfig"},
    bos_token_id=163584, eos_token_id=163586, first_k_dense_replace=1, head_dim=72, hidden_act="silu", hidden_size=2304,
    initializer_range=0.02, intermediate_size=9216, kv_lora_rank=512, mla_use_nope=True, model_max_length=1048576,
    linear_attn_config=dict(
        full_attn_layers=KIMI_ATTENDS, head_dim=128, kda_layers=[n for n in range(1, 28) if n not in KIMI_ATTENDS],
        num_heads=32, short_conv_kernel_size=4,
    ),
    model_type="kimi_linear", moe_intermediate_size=1024, moe_layer_freq=1, moe_renormalize=True,
    moe_router_activation_func="sigmoid", num_attention_heads=32, num_expert_group=1, num_experts=256,
    num_experts_per_token=8, num_hidden_layers=27, num_key_value_heads=32, num_nextn_predict_layers=0, num_shared_experts=1,
    pad_token_id=163839, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-05, rope_scaling=None,
    rope_theta=10000.0, routed_scaling_factor=2.446, tie_word_embeddings=False, topk_group=1, torch_dtype="bfloat16",
    use_cache=True, use_grouped_topk=True, v_head_dim=128, vocab_size=163840,
)  # fmt: skip
KIMI_STATE = 32 * 128 * 128 * 4 + 3 * 12288 * 2
OLMO_STATE = 30 * 96 * 192 * 4 + 3 * 11520 * 2


@pytest.mark.parametrize(
    ("raw", "layers", "width", "state"),
    [
        (LFM2, 10, 8192, 8192),
        (LFM2 | {"intermediate_size": 8192}, 10, 8192, 8192),
        (LFM2_MOE, 18, 7168, 8192),
        (OLMO, 24, 11008, OLMO_STATE),
        (KIMI, 20, 9216, KIMI_STATE),
    ],
)
def test_published_configs_are_read(raw: dict[str, Any], layers: int, width: int, state: int) -> None:
    """Keeps out: a key that every file has and nobody reads; states of another size than the reference says."""
    family = family_of(raw["model_type"])
    assert family is not None
    config = family.parse(raw, "here")
    assert len(config.recurrent_layers) == layers and config.recurrent is not None and config.dtype == "bfloat16"
    assert config.recurrent.state_bytes(torch.bfloat16) == state and config.intermediate_size == width
