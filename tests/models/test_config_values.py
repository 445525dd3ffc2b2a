"""A malformed config.json is refused by folder, key, expected and got, before anything is computed from it.

Keeps out: a bare TypeError or ZeroDivisionError from inside, and "no" taken for true.  See `test_strict.py` for whole models.
"""

from typing import Any

import pytest

from specdec.models.checkpoints.config_values import NotComputedHere
from specdec.models.deepseek.config import parse_deepseek
from specdec.models.llama.config import parse_llama

LLAMA = dict(
    model_type="llama", hidden_size=32, intermediate_size=8, num_hidden_layers=2, num_attention_heads=4, vocab_size=9,
)  # fmt: skip
QWEN = dict(LLAMA, model_type="qwen2", sliding_window=4, use_sliding_window=True)
DEEPSEEK = dict(
    LLAMA, model_type="deepseek_v3", kv_lora_rank=16, q_lora_rank=None, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=16,
    first_k_dense_replace=1, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=8, n_shared_experts=1, n_group=4,
    topk_group=2,
)  # fmt: skip
BAD_COUNTS: tuple[Any, ...] = ("4", 4.0, -1, 0, True, [4])
LLAMA3 = dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
KV_ALONE = dict(quant_method="compressed-tensors", kv_cache_scheme=dict(num_bits=8, type="float"))


def refused(raw: dict[str, Any], *says: str) -> None:
    parse = parse_deepseek if raw["model_type"] == "deepseek_v3" else parse_llama
    with pytest.raises(ValueError, match="^here: ") as info:
        parse(raw, "here")
    assert all(part in str(info.value) for part in says), info.value
    assert not isinstance(info.value, NotComputedHere)  # else transformers' code would be tried


@pytest.mark.parametrize("value", BAD_COUNTS, ids=str)
def test_counts(value: Any) -> None:
    """Every size that is read, in every family."""
    counts = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
    for key in (*counts, "num_key_value_heads", "head_dim", "max_position_embeddings"):
        refused(LLAMA | {key: value}, key, f"got {value!r}")
    experts = ["n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts", "n_group", "topk_group"]
    for key in (*counts, "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", *experts):
        refused(DEEPSEEK | {key: value}, f"{key} must be a whole number of at least 1, got {value!r}")


CASES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (LLAMA, dict(head_dim=0), "head_dim must be even and above 0 for rotary embeddings, got 0"),
    (LLAMA, dict(num_attention_heads=64), "head_dim must be even and above 0 for rotary embeddings, got 0"),
    (LLAMA, dict(num_key_value_heads=3), "num_attention_heads must be a multiple of num_key_value_heads, got 4, 3"),
    (LLAMA, dict(rms_norm_eps="1e-5"), "rms_norm_eps must be a finite number above 0, got '1e-5'"),
    (LLAMA, dict(rms_norm_eps=None), "rms_norm_eps must be a finite number above 0, got None"),
    (LLAMA, dict(rms_norm_eps=float("nan")), "rms_norm_eps must be a finite number above 0, got nan"),
    (LLAMA, dict(rms_norm_eps=float("inf")), "rms_norm_eps must be a finite number above 0, got inf"),
    (LLAMA, dict(rms_norm_eps=10**400), "rms_norm_eps must be a finite number above 0, got 1000"),
    (LLAMA, dict(attention_bias="no"), "attention_bias must be true or false, got 'no'"),
    (LLAMA, dict(mlp_bias=1), "mlp_bias must be true or false, got 1"),
    (LLAMA, dict(tie_word_embeddings="false"), "tie_word_embeddings must be true or false, got 'false'"),
    (LLAMA, dict(dtype=["float16"]), "dtype must be a string or null, got ['float16']"),
    (LLAMA, dict(hidden_act=["silu"]), "hidden_act must be 'silu', got ['silu']"),
    (LLAMA, dict(rope_parameters="x"), "rope_parameters must be an object of keys and values, got 'x'"),
    (LLAMA, dict(rope_scaling=[2.0]), "rope_scaling must be an object of keys and values, got [2.0]"),
    (LLAMA, dict(rope_theta="1e4"), "rope_theta must be a finite number above 0, got '1e4'"),
    (LLAMA, dict(rope_parameters=dict(rope_theta=0)), "rope_theta must be a finite number above 0, got 0"),
    (LLAMA, dict(rope_parameters=dict(rope_type=["default"])), "rope_type must be a string, got ['default']"),
    (LLAMA, dict(rope_parameters=dict(rope_type=None)), "rope_type must be a string, got None"),
    (LLAMA, dict(rope_parameters=LLAMA3 | dict(factor=0)), "factor must be a finite number above 0, got 0"),
    (LLAMA, dict(rope_parameters=LLAMA3 | dict(factor=None)), "rope type 'llama3' needs factor in rope_parameters"),
    (LLAMA, dict(rope_parameters=LLAMA3 | dict(mystery=1)), "unknown rope keys mystery"),
    (LLAMA, dict(partial_rotary_factor="0.5"), "partial_rotary_factor must be a finite number above 0, got '0.5'"),
    (LLAMA, dict(quantization_config="fp8"), "quantization_config must be an object of keys and values, got 'fp8'"),
    (LLAMA, dict(quantization_config=[1]), "quantization_config must be an object of keys and values, got [1]"),
    (LLAMA, dict(quantization_config=KV_ALONE | dict(config_groups=[1])), "quantization_config: config_groups must be an obj"),
    (LLAMA, dict(quantization_config=KV_ALONE | dict(config_groups={"a": 1})), "quantization_config: a must be an object"),
    (LLAMA, dict(quantization_config=KV_ALONE | dict(kv_cache_scheme=8)), "quantization_config: kv_cache_scheme must be an ob"),
    (LLAMA, dict(layer_types="full_attention"), "layer_types must be 2 of full_attention or sliding_attention, got 'full"),
    (LLAMA, dict(layer_types=[["full_attention"]] * 2), "layer_types must be 2 of"),
    (LLAMA, dict(eos_token_id="0"), "eos_token_id must be null, a token id in [0, 8] or a list of such, got '0'"),
    (LLAMA, dict(eos_token_id=0.5), "eos_token_id must be null"),
    (LLAMA, dict(eos_token_id=[1, "2"]), "eos_token_id must be null, a token id in [0, 8] or a list of such, got [1, '2']"),
    (LLAMA, dict(eos_token_id=True), "eos_token_id must be null"),
    (LLAMA, dict(eos_token_id=9), "eos_token_id must be null, a token id in [0, 8] or a list of such, got 9"),
    (LLAMA, dict(eos_token_id=-1), "eos_token_id must be null"),
    (QWEN, dict(max_window_layers="2"), "max_window_layers must be a whole number of at least 0, got '2'"),
    (QWEN, dict(max_window_layers=None), "max_window_layers must be a whole number of at least 0, got None"),
    (QWEN, dict(max_window_layers=-1), "max_window_layers must be a whole number of at least 0, got -1"),
    (QWEN, dict(use_sliding_window="no"), "use_sliding_window must be true or false, got 'no'"),
    (DEEPSEEK, dict(first_k_dense_replace=-1), "first_k_dense_replace must be a whole number of at least 0, got -1"),
    (DEEPSEEK, dict(num_experts_per_tok=9), "num_experts_per_tok must be at most n_routed_experts 8, got 9"),
    (DEEPSEEK, dict(n_group=8, topk_group=4), "n_group must leave two experts a group, whose best two rank it, got 8 of 8"),
    (DEEPSEEK, dict(topk_group=5), "n_routed_experts must be a multiple of n_group"),
    (DEEPSEEK, dict(norm_topk_prob="no"), "norm_topk_prob must be true or false, got 'no'"),
    (DEEPSEEK, dict(rope_interleave=0), "rope_interleave must be true or false, got 0"),
    (DEEPSEEK, dict(routed_scaling_factor="2"), "routed_scaling_factor must be a finite number above 0, got '2'"),
    (DEEPSEEK, dict(num_nextn_predict_layers=-1), "num_nextn_predict_layers must be a whole number of at least 0, got -1"),
    (DEEPSEEK, dict(rope_scaling=dict(type="linear", factor="4")), "factor must be a finite number above 0, got '4'"),
    (DEEPSEEK, dict(rope_scaling="x"), "rope_scaling must be an object of keys and values, got 'x'"),
    (
        DEEPSEEK,
        dict(rope_scaling=dict(type="yarn", factor=-4.0, original_max_position_embeddings=64)),
        "factor must be a finite number above 0, got -4.0",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("base", "changes", "says"), CASES, ids=[str(case[1]) for case in CASES])
def test_values(base: dict[str, Any], changes: dict[str, Any], says: str) -> None:
    refused(base | changes, says)


@pytest.mark.parametrize(
    "changes",
    [
        dict(hidden_act="gelu"),
        dict(rope_parameters=dict(rope_type="yarn", factor=4.0)),
        dict(partial_rotary_factor=0.5),
        dict(layer_types=["linear_attention"] * 2),
        dict(logit_scale=0.5),
    ],
    ids=str,
)
def test_what_is_sound_but_not_computed_is_another_error(changes: dict[str, Any]) -> None:
    """For these alone `backend="auto"` may ask transformers."""
    with pytest.raises(NotComputedHere, match="^here: "):
        parse_llama(LLAMA | changes, "here")


def test_values_as_published_pass() -> None:
    nulls = dict.fromkeys("rope_scaling rope_theta head_dim num_key_value_heads eos_token_id tie_word_embeddings dtype".split())
    config = parse_llama(LLAMA | nulls, "here")
    assert (config.rope.theta, config.head_dim, config.num_kv_heads, config.eos_ids) == (1e4, 8, 4, ())
    assert parse_llama(LLAMA | dict(quantization_config=KV_ALONE, eos_token_id=[0, 8]), "here").eos_ids == (0, 8)
    assert parse_deepseek(DEEPSEEK, "here").experts is not None
