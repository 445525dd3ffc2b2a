"""config.json of Qwen's hybrids as they are published, and a head's that was made from one."""

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.draft.formats.body import parse_head_rope
from specdec.models.keys.wrappers import unwrapped
from specdec.models.qwen_hybrid.config import parse_qwen_hybrid
from specdec.models.registry import choose_target

MROPE = {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}
ROPE = {**MROPE, "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"}
TEXT: dict[str, Any] = dict(
    attention_bias=False, attention_dropout=0.0, attn_output_gate=True, dtype="bfloat16", eos_token_id=248044,
    full_attention_interval=4, head_dim=256, hidden_act="silu", initializer_range=0.02, linear_conv_kernel_dim=4,
    linear_key_head_dim=128, linear_num_key_heads=16, linear_value_head_dim=128, mamba_ssm_dtype="float32",
    max_position_embeddings=262144, mlp_only_layers=[], mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False,
    partial_rotary_factor=0.25, rms_norm_eps=1e-06, rope_parameters=ROPE, use_cache=True, vocab_size=248320,
)  # fmt: skip
DENSE = dict(
    TEXT, model_type="qwen3_5_text", hidden_size=5120, intermediate_size=17408, num_hidden_layers=64, num_attention_heads=24,
    num_key_value_heads=4, linear_num_value_heads=48, output_gate_type="swish",
    layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 16,
)  # fmt: skip
MIXTURE = dict(
    TEXT, model_type="qwen3_5_moe_text", hidden_size=2048, num_hidden_layers=40, num_attention_heads=16, num_key_value_heads=2,
    linear_num_value_heads=32, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512,
    shared_expert_intermediate_size=512, output_router_logits=False, router_aux_loss_coef=0.001,
    layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 10,
)  # fmt: skip
NEXT: dict[str, Any] = dict(
    architectures=["Qwen3NextForCausalLM"], attention_bias=False, attention_dropout=0.0, bos_token_id=151643,
    decoder_sparse_step=1, eos_token_id=151645, full_attention_interval=4, head_dim=256, hidden_act="silu", hidden_size=2048,
    initializer_range=0.02, intermediate_size=5120, linear_conv_kernel_dim=4, linear_key_head_dim=128, linear_num_key_heads=16,
    linear_num_value_heads=32, linear_value_head_dim=128, max_position_embeddings=262144, mlp_only_layers=[],
    model_type="qwen3_next", moe_intermediate_size=512, norm_topk_prob=True, num_attention_heads=16, num_experts=512,
    num_experts_per_tok=10, num_hidden_layers=48, num_key_value_heads=2, output_router_logits=False,
    partial_rotary_factor=0.25, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=10000000, router_aux_loss_coef=0.001,
    shared_expert_intermediate_size=512, tie_word_embeddings=False, torch_dtype="bfloat16", transformers_version="4.57.0.dev0",
    use_cache=True, use_sliding_window=False, vocab_size=151936,
)  # fmt: skip


def wrapped(text: dict[str, Any], **more: Any) -> dict[str, Any]:
    kind = text["model_type"].removesuffix("_text")
    return dict(
        architectures=["X"], image_token_id=248056, language_model_only=False, model_type=kind, text_config=text,
        tie_word_embeddings=False, transformers_version="4.57.0.dev0", video_token_id=248057, vision_end_token_id=248054,
        vision_start_token_id=248053, vision_config={"model_type": kind, "depth": 27}, **more,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "layers", "state"), [(wrapped(DENSE), 48, 3.1e6), (wrapped(MIXTURE), 30, 2.1e6), (NEXT, 36, 2.1e6)]
)
def test_published_configs_are_read(raw: dict[str, Any], layers: int, state: float) -> None:
    """Keeps out: a key that every file has and nobody reads; states of another size than the reference says."""
    config = parse_qwen_hybrid(unwrapped(raw, "here").config, "here")
    assert len(config.recurrent_layers) == layers and config.recurrent is not None and config.dtype == "bfloat16"
    assert config.recurrent.outputs * 128 * 4 == pytest.approx(state, rel=0.02)
    assert (config.rope.theta, config.rope.rotated, config.mtp_layers, config.max_position) == (1e7, 64, 1, 262144)
    assert config.experts is None or (config.experts.router.normed and config.experts.shared_gated)


def test_names_of_a_wrapper_s_weights_in_fp8(tmp_path: Path) -> None:
    """Keeps out: rules about the file's names that never fit ours."""
    kept = ["lm_head", "model.visual", "model.language_model.layers.0.linear_attn.in_proj_a", "mtp.fc"]
    scheme = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": kept}
    (tmp_path / "config.json").write_text(
        json.dumps(wrapped({**DENSE, "tie_word_embeddings": False}, quantization_config=scheme))
    )
    made = choose_target(tmp_path).config.quantization
    assert made is not None
    quantised = [name for name in ("model.layers.0.linear_attn.in_proj_a", "model.layers.0.linear_attn.in_proj_z", "mtp.fc")
                 if made.format_of(name, lambda _: True)]  # fmt: skip
    assert quantised == ["model.layers.0.linear_attn.in_proj_z"]


def test_a_head_s_rope_made_from_a_hybrid_s() -> None:
    """Keeps out: a head refused for keys that change nothing in texts."""
    rope = {key: value for key, value in ROPE.items() if key != "partial_rotary_factor"}
    assert parse_head_rope({"rope_parameters": rope}, None, "here", silent=False).theta == 1e7
    with pytest.raises(ValueError, match="partial_rotary_factor must be absent or 1"):
        parse_head_rope({"rope_parameters": ROPE}, None, "here", silent=False)
