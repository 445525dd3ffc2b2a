"""config.json of DeepSeek V3.2 and GLM-5: what is read, and what is refused by key."""

import json
from pathlib import Path
from typing import Any

import pytest
from toolkit.deepseek import sparse_config

from specdec.models.deepseek.config import parse_deepseek
from specdec.models.latent.config import LatentConfig
from specdec.models.registry import choose_target


def read(name: str, **changes: Any) -> LatentConfig:
    return parse_deepseek(sparse_config(name, **changes), "here")


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("v32", dict(index_topk="drop"), "lacks index_topk"),
    ("v32", dict(index_n_heads=None), "lacks index_n_heads"),
    ("v32", dict(q_lora_rank=None), "lacks q_lora_rank"),
    ("v32", dict(first_k_dense_replace="drop"), "lacks first_k_dense_replace"),
    ("v32", dict(n_group="drop"), "lacks n_group"),
    ("v32", dict(index_topk=0), "index_topk must be a whole number of at least 1, got 0"),
    ("v32", dict(index_topk=True), "index_topk must be a whole number of at least 1, got True"),
    ("v32", dict(index_head_dim=6), "index_head_dim must be at least qk_rope_head_dim 8, .* got 6"),
    ("v32", dict(rope_interleave=False), "rope_interleave must be True, got False"),
    ("v32", dict(indexer_rope_interleave=True), "indexer_rope_interleave must be False for a deepseek_v32 model, got True"),
    ("glm", dict(indexer_rope_interleave=False), "indexer_rope_interleave must be True for a glm_moe_dsa model, got False"),
    ("v32", dict(indexer_types=["full"] * 3), "unknown config keys indexer_types"),
    ("v32", dict(index_topk_freq=2), "unknown config keys index_topk_freq"),
    ("v32", dict(index_kpool=4), "unknown config keys index_kpool"),
    ("v32", dict(scoring_func="softmax"), "scoring_func must be 'sigmoid', got 'softmax'"),
    ("v32", dict(mlp_bias=True), "mlp_bias must be False, got True"),
    ("glm", dict(moe_router_dtype="bfloat16"), "moe_router_dtype must be 'float32', got 'bfloat16'"),
    ("v32", dict(layer_types=["full_attention"] * 3), "layer_types must be a list of 'indexed_attention' for each layer"),
    ("v32", dict(mlp_layer_types=["dense", "sparse"]), "mlp_layer_types must be a list of 'dense' or 'sparse' for each layer"),
    ("v32", dict(mlp_layer_types=["sparse", "dense", "sparse"]), "dense layers before all sparse ones"),
    ("v32", dict(mlp_layer_types=["sparse"] * 3), "first_k_dense_replace is 1, but mlp_layer_types begins with 0 dense layers"),
    ("glm", dict(indexer_types=["shared", "full", "full"]), "indexer_types must begin with 'full'"),
    ("glm", dict(indexer_types=["full", "half", "full"]), "indexer_types must be a list of 'full' or 'shared' for each layer"),
    ("glm", dict(indexer_types=["full"]), "indexer_types must be a list of 'full' or 'shared' for each layer"),
    ("glm", dict(index_topk_pattern="FSX"), "index_topk_pattern must be a list of 'full' or 'shared'"),
    ("glm", dict(index_topk_freq=0), "index_topk_freq must be a whole number of at least 1, got 0"),
    (
        "glm-shared",
        dict(index_topk_freq=1),
        r"indexer_types must be what index_topk_freq says, got \['full', 'shared'",
    ),
    ("v32", dict(quantization_config={"quant_method": "hqq"}), "quant_method must be one of"),
]


@pytest.mark.parametrize(("name", "changes", "says"), REFUSED, ids=[str(case[1]) for case in REFUSED])
def test_what_would_change_the_model_is_refused(name: str, changes: dict[str, Any], says: str) -> None:
    """Keeps out: a key of a relative (pooled indexer keys, other rotary pairs) that is passed over."""
    with pytest.raises(ValueError, match=f"^here:? .*{says}"):
        read(name, **changes)


def sources(**keys: Any) -> tuple[int, ...]:
    indexer = read("glm", num_hidden_layers=8, **keys).indexer
    assert indexer is not None
    return indexer.sources


def test_layers_that_share_a_choice() -> None:
    """GLM's three ways to say it, with transformers' meaning.  Keeps out: a layer that reads another layer's choice."""
    assert sources() == tuple(range(8))
    named = ["full", "full", "full", "shared", "shared", "shared", "full", "shared"]
    ruled = dict(index_topk_freq=4, index_skip_topk_offset=3)
    for keys in (dict(indexer_types=named), ruled, dict(ruled, indexer_types=named), dict(index_topk_pattern="FFFSSSFS")):
        assert sources(**keys) == (0, 1, 2, 2, 2, 2, 6, 6), keys
    assert sources(index_topk_freq=2) == (0, 1, 1, 3, 3, 5, 5, 7)  # transformers' default for the offset is 2


def test_dense_layers_by_either_key() -> None:
    """Keeps out: experts where the checkpoint has an MLP."""
    types = ["dense", "dense", "sparse"]
    for also in ("drop", 2):
        experts = read("v32", mlp_layer_types=types, first_k_dense_replace=also).experts
        assert experts is not None and experts.dense_layers == {0, 1}
    assert read("v32", mlp_layer_types=["dense"] * 3, first_k_dense_replace=7).experts is None


def test_hub_configs_are_read(tmp_path: Path) -> None:
    """The sizes of DeepSeek-V3.2 and GLM-5.2.  Keeps out: refusing a key that both of their config.json hold."""
    common = dict(
        architectures=["X"], attention_bias=False, attention_dropout=0.0, hidden_act="silu", moe_layer_freq=1, ep_size=1,
        first_k_dense_replace=3, kv_lora_rank=512, qk_rope_head_dim=64, n_routed_experts=256, n_shared_experts=1,
        norm_topk_prob=True, num_experts_per_tok=8, num_nextn_predict_layers=1, routed_scaling_factor=2.5,
        topk_method="noaux_tc", scoring_func="sigmoid", moe_intermediate_size=2048, index_head_dim=128, index_topk=2048,
        tie_word_embeddings=False, torch_dtype="bfloat16", use_cache=True, initializer_range=0.02, pretraining_tp=1,
    )  # fmt: skip
    yarn = dict(beta_fast=32, beta_slow=1, factor=40, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=4096)
    v32 = dict(
        common, model_type="deepseek_v32", hidden_size=7168, intermediate_size=18432, num_attention_heads=128,
        num_key_value_heads=128, num_hidden_layers=61, q_lora_rank=1536, qk_nope_head_dim=128, v_head_dim=128, n_group=8,
        topk_group=4, index_n_heads=64, vocab_size=129280, rms_norm_eps=1e-6, max_position_embeddings=163840, rope_theta=10000,
        rope_scaling={**yarn, "type": "yarn"}, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    glm = dict(
        common, model_type="glm_moe_dsa", hidden_size=6144, intermediate_size=12288, num_attention_heads=64, head_dim=192,
        num_key_value_heads=64, num_hidden_layers=78, q_lora_rank=2048, qk_nope_head_dim=192, v_head_dim=256, n_group=1,
        topk_group=1, index_n_heads=32, vocab_size=154880, rms_norm_eps=1e-5, max_position_embeddings=1048576,
        rope_parameters={"rope_theta": 8000000, "rope_type": "default"}, rope_interleave=True, indexer_rope_interleave=True,
        index_topk_pattern=None, index_topk_freq=4, index_skip_topk_offset=3, moe_router_dtype="float32",
        mlp_layer_types=["dense"] * 3 + ["sparse"] * 75, index_share_for_mtp_iteration=True, qk_head_dim=256,
    )  # fmt: skip
    for raw, heads, own in ((v32, 64, 61), (glm, 32, 21)):
        folder = tmp_path / raw["model_type"]
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(raw))
        config = choose_target(folder, "native").config
        assert isinstance(config, LatentConfig) and config.indexer is not None and config.interleaved
        assert (config.indexer.heads, config.indexer.topk, len(set(config.indexer.sources))) == (heads, 2048, own)
        assert config.experts is not None and config.experts.router.scores == "sigmoid" and config.head_dim == 64
