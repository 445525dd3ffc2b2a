"""Keys of config.json of families with unlike heads: each is read, two that say one thing agree, unknown ones are refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.checkpoints.native import ABSENT, NativeZoo, our_logits, their_logits

from specdec.attention.kinds import FULL, LayerKind
from specdec.models.config import ModelConfig
from specdec.models.gemma4.config import parse_gemma4
from specdec.models.kv import token_bytes_by_kind
from specdec.models.mimo_v2.config import parse_mimo_v2

MIMO, GEMMA = "mimo_v2_flash", "gemma4_text"
BOTH = (MIMO, GEMMA)
WINDOWED, WHOLE = "sliding_attention", "full_attention"
ROPES = {WINDOWED: {"rope_type": "default", "rope_theta": 50.0}, WHOLE: {"rope_type": "default", "rope_theta": 900.0}}
HALF = {WINDOWED: ROPES[WINDOWED], WHOLE: {"rope_type": "proportional", "rope_theta": 90.0, "partial_rotary_factor": 0.5}}
SAME = ""
# family, what is changed, what the refusal says; SAME: both compute the same
ROWS: list[tuple[str, dict[str, Any], str]] = [
    *((family, {"brand_new_key": 1}, "unknown config keys brand_new_key") for family in BOTH),
    *((family, {"rms_norm_eps": 0.3}, SAME) for family in BOTH),
    *((family, {"sliding_window": 3}, SAME) for family in BOTH),
    *((family, {"layer_types": [WINDOWED]}, "layer_types must be 2 of") for family in BOTH),
    *((family, {"rope_parameters": {"full": {}}}, "rope_parameters must hold") for family in BOTH),
    *((family, {"num_experts_per_tok" if family == MIMO else "top_k_experts": 99}, "must be at most") for family in BOTH),
    (MIMO, {"rope_parameters": {kind: said | {"partial_rotary_factor": 0.25} for kind, said in ROPES.items()}}, SAME),
    (MIMO, {"rope_parameters": ABSENT}, "rotate an even number"),  # 0.334 of 16
    (MIMO, {"rope_theta": 7.0}, "rope_theta of full_attention must be 5000.0, as in rope_parameters, or absent, got 7.0"),
    (MIMO, {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling"),
    (MIMO, {"sliding_window_size": 3}, "sliding_window must be sliding_window_size 3, or one more, got 6"),
    (MIMO, {"sliding_window_size": 3, "sliding_window": 3, "attention_chunk_size": 3}, SAME),
    (MIMO, {"sliding_window_size": 3, "sliding_window": 4, "attention_chunk_size": 9}, "attention_chunk_size must be"),
    (MIMO, {"hybrid_layer_pattern": [1, 0]}, SAME),
    (MIMO, {"hybrid_layer_pattern": [0, 1]}, "layer_types must say what hybrid_layer_pattern says"),
    (MIMO, {"hybrid_layer_pattern": [2, 1]}, "hybrid_layer_pattern must be a list of 0 or 1"),
    (MIMO, {"moe_layer_freq": [0, 1]}, SAME),
    (MIMO, {"moe_layer_freq": [1, 1], "mlp_layer_types": ABSENT}, "layer 0 is a mixture by moe_layer_freq"),
    (MIMO, {"moe_layer_freq": [1, 0]}, "mlp_layer_types must say what moe_layer_freq says"),
    (MIMO, {"attention_value_scale": 0.3}, SAME),
    (MIMO, {"attention_value_scale": None}, SAME),
    (MIMO, {"attention_value_scale": ABSENT}, SAME),
    (MIMO, {"routed_scaling_factor": None}, SAME),
    (MIMO, {"norm_topk_prob": False}, SAME),
    (MIMO, {"num_key_value_heads": 2, "swa_num_key_value_heads": 2}, "num_key_value_heads, head_dim and hidden_size, of full"),
    (MIMO, {"swa_num_key_value_heads": 2, "swa_num_attention_heads": 4, "swa_head_dim": 16, "swa_v_head_dim": 12}, SAME),
    (MIMO, {"swa_num_key_value_heads": 4}, "swa_num_key_value_heads, swa_head_dim and hidden_size, of windowed"),
    (MIMO, {"swa_num_attention_heads": 2}, "swa_num_attention_heads, swa_head_dim and hidden_size"),
    (MIMO, {"swa_head_dim": 8}, "swa_num_attention_heads, swa_head_dim and hidden_size"),
    (MIMO, {"swa_v_head_dim": 8}, "swa_num_key_value_heads, swa_v_head_dim and hidden_size"),
    (MIMO, {"v_head_dim": 8}, "num_key_value_heads, v_head_dim and hidden_size"),
    (MIMO, {"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False}, SAME),
    (MIMO, {"add_full_attention_sink_bias": True}, "attention_sink_bias"),
    (MIMO, {"add_swa_attention_sink_bias": False}, "sink"),
    (MIMO, {"layernorm_epsilon": 0.3, "rms_norm_eps": ABSENT}, "SAME AS rms_norm_eps"),
    (MIMO, {"layernorm_epsilon": 0.3}, "layernorm_epsilon is another name of rms_norm_eps"),
    (MIMO, {"attention_projection_layout": "fused_qkv"}, "attention_projection_layout must be 'split'"),
    (MIMO, {"scoring_func": "softmax"}, "scoring_func must be 'sigmoid'"),
    (MIMO, {"topk_method": "greedy"}, "topk_method must be 'noaux_tc'"),
    (MIMO, {"n_shared_experts": 1}, "n_shared_experts must be 0"),
    (MIMO, {"n_group": 2, "topk_group": 1}, SAME),
    (GEMMA, {"rope_parameters": ROPES}, SAME),
    (GEMMA, {"rope_parameters": HALF}, SAME),
    (GEMMA, {"rope_parameters": ROPES | {WHOLE: HALF[WHOLE] | {"factor": 2.0}}}, SAME),
    (GEMMA, {"rope_parameters": ROPES | {WHOLE: HALF[WHOLE] | {"beta_fast": 2.0}}}, "unknown keys beta_fast"),
    (GEMMA, {"rope_parameters": ROPES | {WHOLE: {"rope_type": "proportional"}}}, "lacks rope_theta"),
    (GEMMA, {"rope_parameters": ABSENT}, SAME),
    (GEMMA, {"rope_theta": 7.0}, "rope_theta must be None"),
    (GEMMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor must be None"),
    (GEMMA, {"hidden_activation": "silu"}, "hidden_activation must be 'gelu_pytorch_tanh'"),
    (GEMMA, {"use_bidirectional_attention": "vision"}, SAME),
    (GEMMA, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention must be 'vision'"),
    (GEMMA, {"final_logit_softcapping": 2.0}, SAME),
    (GEMMA, {"per_layer_config": ABSENT, "global_head_dim": 24, "num_global_key_value_heads": 2}, SAME),
    (GEMMA, {"global_head_dim": 24, "num_global_key_value_heads": 2}, SAME),
    (GEMMA, {"global_head_dim": 32}, "global_head_dim must be 24, as in per_layer_config, or absent, got 32"),
    (GEMMA, {"per_layer_config": {"0": {"head_dim": 24}}}, "per_layer_config must hold the same"),
    (GEMMA, {"per_layer_config": {"1": {"sliding_window": 24}}}, "per_layer_config must hold the same"),
    (GEMMA, {"per_layer_config": ABSENT}, "num_attention_heads, global_head_dim and hidden_size"),
    (GEMMA, {"attention_k_eq_v": False}, "v_proj"),
    (GEMMA, {"layer_types": [WHOLE, WINDOWED]}, "layer_types must end in full_attention"),
    (GEMMA, {"num_kv_shared_layers": 1}, "num_kv_shared_layers must leave a layer of each type"),
    (GEMMA, {"num_experts_per_tok": 1}, "num_experts_per_tok is another name of top_k_experts"),
    (GEMMA, {"top_k_experts": 1}, SAME),
    (GEMMA, {"moe_intermediate_size": 21}, "moe_intermediate_size and hidden_size"),
    (GEMMA, {"intermediate_size": 50}, "intermediate_size, use_double_wide_mlp and hidden_size"),
    (GEMMA, {"enable_moe_block": False}, "experts"),
    (GEMMA, {"use_double_wide_mlp": True}, SAME),  # no layer shares keys
    (GEMMA, {"hidden_size_per_layer_input": 4}, "embed_tokens_per_layer"),
    (
        GEMMA,
        {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 50},
        "vocab_size_per_layer_input must be vocab_size",
    ),
    (GEMMA, {"attention_bias": True}, "bias"),
]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> NativeZoo:
    return NativeZoo(tmp_path_factory.mktemp("native"))


@pytest.mark.parametrize(("family", "changes", "says"), ROWS)
def test_keys_mean_what_transformers_computes(
    zoo: NativeZoo, tmp_path: Path, family: str, changes: dict[str, Any], says: str
) -> None:
    """Keeps out: a key that is passed over, or read as something else, and a second one that contradicts it unseen."""
    ours, theirs = zoo.changed(family, changes, tmp_path)
    if says.startswith("SAME AS"):  # a name that transformers does not read
        path = theirs / "config.json"
        raw = json.loads(path.read_text())
        path.write_text(json.dumps({**raw, says.removeprefix("SAME AS "): next(iter(changes.values()))}))
    elif says:
        with pytest.raises(ValueError, match=says):
            our_logits(ours)
        return
    torch.testing.assert_close(our_logits(ours), their_logits(theirs)[0], atol=1e-4, rtol=1e-4)


VALUES: tuple[Any, ...] = (
    None, "", "x", -1, 0, 10**9, 1e9, 10**30, 0.5, float("nan"), True, [], [None], ["x"] * 2, [1, 0], {}, {"a": 1},
    {"1": {"head_dim": "x"}}, {WHOLE: 3, WINDOWED: []},
)  # fmt: skip


@pytest.mark.parametrize(("family", "parse"), [(MIMO, parse_mimo_v2), (GEMMA, parse_gemma4)], ids=BOTH)
def test_wrong_values_are_read_or_refused(zoo: NativeZoo, family: str, parse: Callable[[dict[str, Any], str], object]) -> None:
    """Every key that a row or a file has, with every value.  Keeps out: any other error than one that names file and key."""
    raw = zoo.config(family)
    keys = raw.keys() | {key for own, changes, _ in ROWS if own == family for key in changes}
    changed = [{**raw, key: value} for key in sorted(keys) for value in VALUES]
    said = raw["rope_parameters"]
    for kind in said:
        for key in ("rope_type", "rope_theta", "partial_rotary_factor", "factor"):
            changed += [{**raw, "rope_parameters": {**said, kind: {**said[kind], key: value}}} for value in VALUES]
    for config in changed:
        try:
            parse(config, "config.json")
        except ValueError as error:
            assert str(error).startswith("config.json"), error


_RAW: dict[str, Any] = dict(
    architectures=["X"], attention_bias=False, attention_dropout=0.0, bos_token_id=2, eos_token_id=1, initializer_range=0.02,
    pad_token_id=0, torch_dtype="bfloat16", transformers_version="5.5.0", use_cache=True,
)  # fmt: skip
_GEMMA: dict[str, Any] = _RAW | dict(
    model_type=GEMMA, attention_k_eq_v=True, enable_moe_block=False, final_logit_softcapping=30.0, global_head_dim=512,
    head_dim=256, hidden_activation="gelu_pytorch_tanh", hidden_size_per_layer_input=0, max_position_embeddings=262144,
    num_experts=None, num_kv_shared_layers=0, rms_norm_eps=1e-6, rope_parameters=None, sliding_window=1024,
    tie_word_embeddings=True, top_k_experts=None, use_bidirectional_attention="vision", use_double_wide_mlp=False,
    vocab_size=262144, vocab_size_per_layer_input=262144, moe_intermediate_size=None,
)  # fmt: skip
B31 = _GEMMA | dict(
    hidden_size=5376, intermediate_size=21504, num_hidden_layers=60, num_attention_heads=32, num_key_value_heads=16,
    num_global_key_value_heads=4,
)  # fmt: skip
E4B = _GEMMA | dict(
    hidden_size=2560, intermediate_size=10240, num_hidden_layers=42, num_attention_heads=8, num_key_value_heads=2,
    num_global_key_value_heads=None, attention_k_eq_v=False, num_kv_shared_layers=18, hidden_size_per_layer_input=256,
    sliding_window=512, max_position_embeddings=131072, use_bidirectional_attention=None,
)  # fmt: skip
FLASH = _RAW | dict(
    model_type=MIMO, add_full_attention_sink_bias=False, add_swa_attention_sink_bias=True, attention_chunk_size=128,
    attention_value_scale=0.707, head_dim=192, hidden_act="silu", hidden_size=4096, hybrid_block_size=None,
    hybrid_layer_pattern=[0 if layer == 0 or layer % 6 == 5 else 1 for layer in range(48)], intermediate_size=16384,
    layernorm_epsilon=1e-5, max_position_embeddings=262144, moe_intermediate_size=2048, moe_layer_freq=[0] + [1] * 47,
    n_group=1, n_routed_experts=256, n_shared_experts=None, norm_topk_prob=True, num_attention_heads=64,
    num_experts_per_tok=8, num_hidden_layers=48, num_key_value_heads=4, partial_rotary_factor=0.334, rope_theta=5000000,
    routed_scaling_factor=None, scoring_func="sigmoid", sliding_window=128, sliding_window_size=128, swa_head_dim=192,
    swa_num_attention_heads=64, swa_num_key_value_heads=8, swa_rope_theta=10000, swa_v_head_dim=128, topk_group=1,
    topk_method="noaux_tc", tie_word_embeddings=False, v_head_dim=128, vocab_size=152576,
)  # fmt: skip


def token_bytes(config: ModelConfig) -> dict[str, int]:
    return token_bytes_by_kind(config, "auto", torch.bfloat16)


def test_published_configs() -> None:
    """Bytes of a token by hand: layers x 2 bytes x heads x (width of a key and of a value)."""
    config = parse_gemma4(B31, "config.json")
    assert token_bytes(config) == {"window 1024": 50 * 2 * 16 * 512, "full": 10 * 2 * 4 * 1024}
    full = dict(config.unlike_heads)[FULL]
    assert full.values_are_keys and full.rope.share == 0.25 and config.rope.theta == 1e4 and config.kv_holders(8) == 1
    config = parse_gemma4(E4B, "config.json")
    assert token_bytes(config) == {"window 512": 20 * 2 * 2 * 512, "full": 4 * 2 * 2 * 1024}
    assert config.kv_source[-2:] == (22, 23) and config.input_size == 256 and config.first_sharing_layer == 24
    config = parse_mimo_v2(FLASH, "config.json")
    assert token_bytes(config) == {"full": 9 * 2 * 4 * 320, "window 129": 39 * 2 * 8 * 320}
    windowed = dict(config.unlike_heads)[LayerKind(window=129)]
    assert (windowed.has_sinks, config.has_sinks, windowed.rope.rotated, config.value_scale) == (True, False, 64, 0.707)
