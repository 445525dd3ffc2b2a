"""Keys of a config.json that say one thing, set to different things, in every native family: what transformers computes, or an
error that names them.  Rules in docs/MODELS.md.

A row changes the config.json of a tiny random model.  What it comes to is `SAME`, our logits being transformers' own forward's
(which must agree with itself when it reads its cache), or a part of our error.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.checkpoints.native import ABSENT, UNLIKE, NativeZoo, our_logits, their_logits
from toolkit.checkpoints.two_keys import (
    ALL,
    BAMBA,
    BY_STATES,
    BY_TYPES,
    DEEPSEEKS,
    DEFAULT,
    DOTS,
    ERNIE,
    FALCON,
    FP8,
    FULL,
    GLM4,
    GPT,
    GRANITE,
    HY3,
    HYBRIDS,
    KIMI,
    LATENT,
    LFM2,
    LINEAR,
    LINEAR_WORD,
    LITE,
    LLAMA3,
    LLAMAS,
    MAY_BE_TIED,
    MINIMAX,
    MIXED,
    MIXTURES,
    NEMOTRON,
    NEVER_TIED,
    OF_HYBRIDS,
    OLMO,
    OLMOE,
    ON,
    ORDINARY,
    QWEN_MOES,
    QWENS,
    SAME,
    SPARSE,
    TIED,
    UNTIED,
    WHOLE,
    WINDOWED,
    YARN,
    KeyGroup,
)
from toolkit.paths import ROOT
from transformers import CONFIG_MAPPING

from specdec.models.registry import NATIVE, family_of

GROUPS = OF_HYBRIDS | {
    "rope": KeyGroup(
        "rope_parameters rope_scaling rope_theta partial_rotary_factor original_max_position_embeddings initial_context_length "
        "rotary_dim",
        [
            (ALL, {"rope_parameters": DEFAULT, "rope_theta": 900.0}, SAME),  # what stands within counts
            (ALL, {"rope_parameters": ABSENT, "rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 900.0}, SAME),
            (ALL, {"rope_parameters": LINEAR | {"type": "default"}}, SAME),
            (ALL, {"rope_parameters": DEFAULT | {"type": "linear", "factor": 2.0}}, SAME),
            (ALL, {"rope_parameters": DEFAULT, "rope_scaling": LINEAR}, "rope_parameters and rope_scaling must say the same"),
            (ALL, {"rope_parameters": LINEAR | {"rope_theta": None}, "rope_theta": 900.0}, "rope_theta"),
            ((*DEEPSEEKS, *GPT, *MIXTURES[:7]), {"rope_parameters": YARN | {"rope_theta": None}}, "rope_theta"),
            ((*LLAMAS, *GPT, *LITE, *MIXTURES, *BY_STATES), {"rope_parameters": WHOLE, "partial_rotary_factor": 0.5}, SAME),
            (GLM4, {"rope_parameters": DEFAULT, "partial_rotary_factor": 0.25}, SAME),
            (MINIMAX, {"rope_parameters": DEFAULT, "rotary_dim": 4}, SAME),
            (MINIMAX, {"rope_parameters": DEFAULT, "rotary_dim": 4, "partial_rotary_factor": 0.5}, SAME),
            ((*GLM4, *MINIMAX), {"rope_parameters": YARN}, SAME),
            ((*LLAMAS, *GPT, *LITE), {"rope_parameters": LINEAR, "partial_rotary_factor": 0.5}, "partial_rotary_factor must"),
            (GPT, {"rope_parameters": YARN, "partial_rotary_factor": 0.5}, "partial_rotary_factor must be"),
            (DEEPSEEKS, {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor must be"),
            (ALL, {"rope_parameters": LLAMA3, "original_max_position_embeddings": 64}, "unknown config keys original_max"),
            (GPT, {"rope_parameters": YARN, "initial_context_length": 64}, SAME),
        ],
    ),
    "rope's factors": KeyGroup(
        "rope_parameters max_position_embeddings",
        [
            ((*LLAMAS, *GLM4, *MINIMAX, *BY_STATES), {"rope_parameters": LLAMA3, "max_position_embeddings": 512}, SAME),
            ((*DEEPSEEKS, *GPT, *MIXTURES[:7], *HYBRIDS), {"rope_parameters": YARN, "max_position_embeddings": 512}, SAME),
            (KIMI, {"rope_parameters": YARN, "max_position_embeddings": 256}, SAME),  # nothing is turned
            (
                (*DEEPSEEKS, *GPT),
                {"rope_parameters": YARN | {"attention_factor": 1.7, "mscale": 0.7, "mscale_all_dim": 1.2}},
                SAME,
            ),
        ],
    ),
    "length": KeyGroup(
        "max_position_embeddings max_sequence_length model_max_length",
        [
            (
                ORDINARY,
                {"max_position_embeddings": 128, "max_sequence_length": 9, "model_max_length": 9},
                SAME,
            ),
            (KIMI, {"max_position_embeddings": 128}, "model_max_length is another name of max_position_emb.* got 256 and 128"),
            (KIMI, {"max_position_embeddings": 128, "model_max_length": ABSENT}, SAME),
        ],
    ),
    "family": KeyGroup("model_type architectures", [(ALL, {"architectures": ["GemmaForCausalLM"]}, SAME)]),
    "window": KeyGroup(
        "sliding_window use_sliding_window max_window_layers layer_types",
        [
            (("llama",), {"sliding_window": 8}, "sliding_window must be null or absent in a llama model, got 8.* 'mistral'"),
            (("llama",), {"sliding_window": 8, "use_sliding_window": False}, "sliding_window must be null or absent"),
            (("llama",), {"sliding_window": 8, "layer_types": [FULL] * 2}, SAME),
            (("llama",), {"sliding_window": 256}, SAME),  # as long as a text may be
            (("llama", *GPT), {"use_sliding_window": True, "max_window_layers": 1}, SAME),
            (("diffllama",), {"sliding_window": 8}, "sliding_window must be absent, null or false in a diffllama model, got 8"),
            (("diffllama",), {"layer_types": [FULL] * 2}, "layer_types must be absent, null or false in a diffllama model"),
            (("diffllama",), {"use_sliding_window": True}, "use_sliding_window must be absent, null or false"),
            (("diffllama",), {"max_window_layers": 1, "use_sliding_window": False}, SAME),
            (("llama", "mistral"), {"sliding_window": 8, "layer_types": [FULL, WINDOWED]}, "alike .*sliding_window 8.*"),
            (("mistral",), {"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 1}, SAME),
            (("mistral",), {"sliding_window": None, "use_sliding_window": True}, SAME),
            (QWENS, {"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 0, "layer_types": ABSENT}, SAME),
            (QWENS, {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1, "layer_types": ABSENT}, SAME),
            (QWENS, {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1, "layer_types": MIXED}, SAME),
            (QWENS, {"sliding_window": None, "use_sliding_window": True, "max_window_layers": 0, "layer_types": ABSENT}, SAME),
            (
                QWENS,
                {"sliding_window": 8, "use_sliding_window": False, "layer_types": [FULL, WINDOWED]},
                "use_sliding_window False and sliding_window 8",
            ),
            (("qwen2_moe",), ON | {"max_window_layers": 1, "layer_types": MIXED[::-1]}, SAME),
            (("qwen2_moe",), ON | {"max_window_layers": 2, "layer_types": ABSENT}, SAME),
            (QWEN_MOES, {"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 1}, SAME),
            (("qwen2_moe",), ON | {"use_sliding_window": False, "layer_types": MIXED}, "use_sliding_window False"),
            (("qwen3_moe",), ON | {"max_window_layers": 1}, SAME),
            (DOTS, {"sliding_window": 8, "max_window_layers": 1, "layer_types": ABSENT}, SAME),
            (DOTS, {"sliding_window": 8, "max_window_layers": 0, "layer_types": MIXED}, SAME),
            (DOTS, {"sliding_window": None, "layer_types": MIXED}, "but no sliding_window is switched on"),
            ((*DOTS, *HYBRIDS), {"use_sliding_window": True}, "use_sliding_window must be False"),
            (("mixtral",), {"sliding_window": 8, "use_sliding_window": False}, "unknown config keys use_sliding_window"),
            (GPT, {"sliding_window": 6, "layer_types": [FULL, WINDOWED]}, SAME),
            (GPT, {"sliding_window": 6, "layer_types": ABSENT, "use_sliding_window": False, "max_window_layers": 9}, SAME),
            (NEMOTRON, {"sliding_window": 8, "layer_types": [LINEAR_WORD, FULL, "moe"]}, "sliding_window must be None"),
            (GPT, {"sliding_window": None, "layer_types": [WINDOWED] * 2}, "no sliding_window is switched on"),
        ],
    ),
    "width of a head": KeyGroup(
        "head_dim qk_head_dim qk_rope_head_dim",
        [
            (ORDINARY, {"head_dim": 20}, "q_proj.weight' must have shape .* num_attention_heads, head_dim"),
            (("llama", "diffllama"), {"head_dim": None}, SAME),  # hidden_size / num_attention_heads
            ((*OLMOE, *LFM2, *GRANITE, *FALCON, *OLMO), {"head_dim": ABSENT}, SAME),
            ((*MIXTURES[1:], *HYBRIDS), {"head_dim": ABSENT}, "q_proj.weight' must have shape"),
            (("qwen2", "mimo"), {"head_dim": ABSENT}, SAME),
            (("deepseek_v3", *LITE), {"head_dim": 16}, "head_dim must be qk_rope_head_dim, 8, or absent, got 16.* no head_dim"),
            (("deepseek_v2", *SPARSE, *KIMI), {"head_dim": 16}, SAME),  # GLM-5.2 says 192, and rotates 64
            (KIMI, {"qk_head_dim": 24}, "qk_head_dim must be qk_nope_head_dim . qk_rope_head_dim, 12, or absent, got 24"),
            (DEEPSEEKS, {"qk_head_dim": 24}, "qk_head_dim must be qk_nope_head_dim . qk_rope_head_dim, 20, or absent, got 24"),
        ],
        least=1,
    ),
    "heads of keys": KeyGroup(
        "num_key_value_heads",
        [
            (ORDINARY, {"num_key_value_heads": 4}, "k_proj.weight' must have shape .* num_key_value_heads"),
            (("mistral",), {"num_key_value_heads": 1}, SAME),
            (("llama", "qwen2", "qwen3", "mimo", "diffllama"), {"num_key_value_heads": None}, "k_proj.weight' must have shape"),
            (LATENT, {"num_key_value_heads": 2}, "num_key_value_heads must be num_attention_heads, 4, or absent, got 2"),
        ],
        least=1,
    ),
    "output layer": KeyGroup(
        "tie_word_embeddings tie_embedding",
        [
            (NEVER_TIED, {"tie_word_embeddings": True}, "tie_word_embeddings must be False"),
            (MAY_BE_TIED, {"tie_word_embeddings": True}, "ties lm_head to the embeddings, but the checkpoint"),
            (tuple(name for name in UNTIED if name not in ERNIE), {"tie_word_embeddings": ABSENT}, SAME),
            (ERNIE, {"tie_word_embeddings": ABSENT}, "ties lm_head to the embeddings, but the checkpoint"),
            (TIED, {"tie_word_embeddings": False}, "'lm_head.weight' is missing"),
            (TIED[:2], {"tie_word_embeddings": ABSENT}, "'lm_head.weight' is missing"),
            (LFM2, {"tie_word_embeddings": ABSENT}, SAME),
            (LFM2, {"tie_embedding": False}, "tie_embedding is another name of tie_word_embeddings, .* got False and True"),
        ],
        least=1,
    ),
    "biases": KeyGroup(
        "attention_bias mlp_bias qkv_bias use_bias",
        [
            (("llama", "qwen3", "diffllama", *DEEPSEEKS[:3], *LITE), {"attention_bias": True}, ".bias' is missing"),
            (("mistral",), {"attention_bias": True}, "attention_bias must be false or absent in a mistral model"),
            (("qwen2", "mimo"), {"attention_bias": False}, SAME),
            (("qwen2", "mimo"), {"attention_bias": True}, SAME),
            (("glm_moe_dsa", *GPT, *OLMOE), {"attention_bias": False}, "not part of this architecture: .*bias"),
            (("qwen3_moe", *GLM4, *HY3, *DOTS, *HYBRIDS, *OLMO), {"attention_bias": True}, ".bias' is missing"),
            ((*HY3, *FALCON, *BAMBA), {"mlp_bias": True}, ".bias' is missing"),
            ((*GRANITE, *FALCON, *BAMBA), {"attention_bias": True}, ".bias' is missing"),
            (NEMOTRON, {"attention_bias": True}, "attention_bias must be False"),
            (NEMOTRON, {"mlp_bias": True}, "mlp_bias must be False"),
            (NEMOTRON, {"use_bias": True}, ".bias' is missing"),
            (ERNIE, {"use_bias": True}, "use_bias must be false"),
            (ERNIE, {"attention_bias": True}, "unknown config keys attention_bias"),
            (("qwen2_moe",), {"qkv_bias": True}, ".bias' is missing"),
            (("qwen3_moe",), {"qkv_bias": True}, "qkv_bias must be False"),
            (("qwen2_moe", "mixtral", *MINIMAX), {"attention_bias": True}, "unknown config keys attention_bias"),
            (("mistral", *QWENS), {"mlp_bias": True}, "mlp_bias must be false or absent in a .* model"),
            (("llama", "deepseek_v2"), {"mlp_bias": True}, ".bias' is missing"),
            (("diffllama", "deepseek_v3", *SPARSE, *LITE), {"mlp_bias": True}, "mlp_bias must be"),
            (GPT, {"mlp_bias": True}, SAME),
        ],
    ),
    "experts": KeyGroup(
        "n_routed_experts num_local_experts num_experts moe_num_experts",
        [
            (DEEPSEEKS, {"num_local_experts": 16}, "num_local_experts is another name of n_routed_experts, .* got 16 and 8"),
            ((*DEEPSEEKS, *GLM4, *DOTS), {"num_experts": 4}, "num_experts is another name of n_routed_experts, .* got 4 and 8"),
            (DEEPSEEKS, {"num_experts": 8, "num_local_experts": 8}, SAME),
            (KIMI, {"n_routed_experts": 8}, "num_experts is another name of n_routed_experts, .* got 6 and 8"),
            (KIMI, {"num_experts": ABSENT, "num_local_experts": 6}, SAME),
            (("qwen3_moe", *HY3, *OLMOE), {"num_experts": 8, "num_local_experts": 6}, "another name of num_experts.* 6 and 8"),
            (("qwen3_moe", *HY3, *OLMOE), {"num_experts": ABSENT, "num_local_experts": 8}, SAME),
            (ERNIE, {"num_experts": 6}, "num_experts is another name of moe_num_experts, .* got 6 and 8"),
            (ERNIE, {"moe_num_experts": ABSENT, "num_experts": 8}, SAME),
            (("qwen2_moe",), {"num_local_experts": 6}, "unknown config keys num_local_experts"),
            ((*GPT, "mixtral", *MINIMAX), {"num_experts": 6}, "num_experts is another name of num_local_experts, .* got 6 and"),
            ((*GLM4, *DOTS), {"num_local_experts": 16}, "another name of n_routed_experts, .* got 16 and 8"),
            ((*GPT, "mixtral"), {"num_experts": 4, "num_local_experts": ABSENT}, SAME),
            (MINIMAX, {"num_experts": 8, "num_local_experts": ABSENT}, SAME),
            (GRANITE, {"num_experts": 4}, "num_experts is another name of num_local_experts, .* got 4 and 6"),
            (NEMOTRON, {"num_local_experts": 4}, "num_local_experts is another name of n_routed_experts, .* got 4 and 6"),
        ],
    ),
    "experts of a token": KeyGroup(
        "num_experts_per_tok experts_per_token moe_k num_experts_per_token",
        [
            (KIMI, {"num_experts_per_tok": 3}, "num_experts_per_token is another name of num_experts_per_tok, .* got 2 and 3"),
            (KIMI, {"num_experts_per_token": ABSENT, "num_experts_per_tok": 2}, SAME),
            (ERNIE, {"num_experts_per_tok": 2}, "num_experts_per_tok is another name of moe_k, .* got 2 and 3"),
            (ERNIE, {"moe_k": ABSENT, "num_experts_per_tok": 3}, SAME),
            (GPT, {"experts_per_token": 3}, "experts_per_token must be num_experts_per_tok, 2, or absent, got 3")],
    ),
    "dense layers": KeyGroup(
        "first_k_dense_replace mlp_layer_types moe_layer_freq mlp_only_layers decoder_sparse_step moe_layer_start_index "
        "moe_layer_end_index moe_layer_interval",
        [
            (("qwen2_moe",), {"mlp_only_layers": [], "decoder_sparse_step": 2}, SAME),  # both say that the first layer is dense
            (ERNIE, {"moe_layer_start_index": 0, "moe_layer_interval": 2, "moe_layer_end_index": 7}, SAME),
            (ERNIE, {"moe_layer_start_index": 1, "moe_layer_interval": 1, "moe_layer_end_index": 0}, "layer 1 is dense by moe"),
            (("qwen3_moe", "qwen3_next"), {"mlp_only_layers": [1], "decoder_sparse_step": 2}, "layer 0 is dense by mlp_only"),
            (LATENT, {"moe_layer_freq": 2}, "moe_layer_freq must be 1, got 2"),
            (KIMI, {"first_k_dense_replace": 1}, "first_k_dense_replace must say what mlp_layer_types says"),
            (KIMI, {"first_k_dense_replace": 0, "mlp_layer_types": ABSENT}, SAME),
            (HY3, {"first_k_dense_replace": 2}, "first_k_dense_replace must say what mlp_layer_types says"),
            (BY_TYPES, {"first_k_dense_replace": 2, "mlp_layer_types": ["dense", "sparse"]}, "first_k_dense_replace is 2, but"),
            (BY_TYPES, {"first_k_dense_replace": ABSENT, "mlp_layer_types": ["dense", "sparse"]}, SAME),
        ],
    ),
    "layers of MTP": KeyGroup(
        "num_nextn_predict_layers num_mtp_layers",
        [
            (("deepseek_v3", *BY_TYPES), {"num_nextn_predict_layers": 1, "num_mtp_layers": 2}, "another name of .* 2 and 1"),
            (("deepseek_v2",), {"num_nextn_predict_layers": 0, "num_mtp_layers": 2}, "another name of .* got 2 and 0"),
            (("deepseek_v3", *GLM4), {"num_nextn_predict_layers": ABSENT, "num_mtp_layers": 1}, SAME),
            (GLM4, {"num_nextn_predict_layers": 1, "num_mtp_layers": 2}, "another name of .* got 2 and 1"),
        ],
    ),
    "shared indexers": KeyGroup(
        "indexer_types index_topk_pattern index_topk_freq index_skip_topk_offset",
        [
            (("glm_moe_dsa",), {"indexer_types": ["full"] * 2, "index_topk_pattern": "FS"}, "indexer_types must be what"),
            (("glm_moe_dsa",), {"index_topk_pattern": "FF", "index_topk_freq": 7, "index_skip_topk_offset": 1}, SAME),
        ],
    ),
    "weights in few bits": KeyGroup(
        "quantization_config compression_config",
        [((*ORDINARY, *KIMI), {"quantization_config": FP8, "compression_config": {**FP8, "x": 1}}, "must be equal")],
    ),
}  # fmt: skip
ROWS = [
    pytest.param(family, changes, says, id=f"{family}-{name}-{number}")
    for name, group in GROUPS.items()
    for number, (families, changes, says) in enumerate(group.rows)
    for family in families
]


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> NativeZoo:
    return NativeZoo(tmp_path_factory.mktemp("native"))


@pytest.mark.slow_cases(keep=20)
@pytest.mark.parametrize(("family", "changes", "says"), ROWS)
def test_two_keys_mean_what_transformers_computes(
    zoo: NativeZoo, tmp_path: Path, family: str, changes: dict[str, Any], says: str
) -> None:
    """Keeps out: a window, a rope, a bias or a count that one key names and the other, which is read, does not."""
    ours, theirs = zoo.changed(family, changes, tmp_path)
    if says:
        with pytest.raises(ValueError, match=says):
            our_logits(ours)
        return
    got_TV, (want_TV, last_V) = our_logits(ours), their_logits(theirs)
    torch.testing.assert_close(want_TV[-1], last_V, atol=1e-4, rtol=1e-4, msg=f"transformers contradicts itself: {changes}")
    torch.testing.assert_close(got_TV, want_TV, atol=1e-4, rtol=1e-4)


def test_every_native_family_has_rows_for_all_keys_that_it_knows(zoo: NativeZoo) -> None:
    """Keeps out: a family that is added, or a key that is let in beside another, whose two values nobody has compared."""
    assert {*NATIVE} == {name for name in (*CONFIG_MAPPING, *NATIVE) if family_of(name)} == {*ALL, *UNLIKE}
    for family in ALL:
        raw, grouped = zoo.config(family), set[str]()
        for name, group in GROUPS.items():
            keys = group.keys.split()
            known = {key for key in keys if is_known(family, raw, key)}
            tried = {key for families, changes, _ in group.rows if family in families for key in changes}
            assert tried <= {*keys}, (name, family)
            if len(known) >= group.least:
                assert tried and known <= tried | raw.keys(), (name, family, known - tried)
            grouped |= {*keys}
        others = CONFIG_MAPPING[family].attribute_map if family in CONFIG_MAPPING else {}
        assert {*others, *others.values()} <= grouped, f"{family}: transformers takes {others} for one thing"


def test_the_page_has_a_row_for_every_group() -> None:
    """Keeps out: a rule that is computed and nowhere written down."""
    section = (ROOT / "docs" / "MODELS.md").read_text().partition("### Two keys")[2].partition("###")[0]
    rows = {line.split("|")[1].strip(): line for line in section.splitlines() if "|" in line}
    for name, group in GROUPS.items():
        assert not (missing := [key for key in group.keys.split() if f"`{key}`" not in rows[name]]), (name, missing)


def is_known(family: str, raw: dict[str, Any], key: str) -> bool:
    """Whether the family's parser lets the key in."""
    native = family_of(family)
    assert native is not None
    try:
        native.parse({**raw, key: raw.get(key)}, "here")
    except ValueError as error:
        return f"unknown config keys {key}" not in str(error)
    return True
