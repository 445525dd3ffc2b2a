"""Configs of wrappers: published ones are read, rules about matrices fit in all spellings, wrong ones are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit.checkpoints.plans import plan_memory
from toolkit.oracles.quantised import SCHEMES, as_quantised
from toolkit.wrappers.wrapped import WRAPPED, our_logits, wrapped_model
from transformers import CONFIG_MAPPING

from specdec import EngineOptions
from specdec.loading.about.inspect_target import target_facts
from specdec.models.keys.wrapper_table import LEFT, WRAPPERS
from specdec.models.keys.wrappers import unwrapped
from specdec.models.registry import check_chosen, choose_target, family_of, load_chosen

QWEN3_VL: dict[str, Any] = dict(  # Qwen3-VL-8B-Instruct's sizes
    model_type="qwen3_vl_text", attention_bias=False, attention_dropout=0.0, bos_token_id=151643, dtype="bfloat16",
    eos_token_id=151645, head_dim=128, hidden_act="silu", hidden_size=4096, initializer_range=0.02, intermediate_size=12288,
    max_position_embeddings=262144, num_attention_heads=32, num_hidden_layers=36, num_key_value_heads=8, rms_norm_eps=1e-06,
    rope_scaling={"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}, rope_theta=5000000,
    use_cache=True, vocab_size=151936,
)  # fmt: skip
QWEN_TOKENS = dict(image_token_id=151655, video_token_id=151656, vision_start_token_id=151652, vision_end_token_id=151653)
KIMI: dict[str, Any] = dict(  # Kimi-K2.5's sizes and int4
    model_type="kimi_k2", architectures=["DeepseekV3ForCausalLM"], attention_bias=False, aux_loss_alpha=0.001, ep_size=1,
    bos_token_id=163584, eos_token_id=163585, first_k_dense_replace=1, hidden_act="silu", hidden_size=7168,
    intermediate_size=18432, kv_lora_rank=512, max_position_embeddings=262144, moe_intermediate_size=2048, moe_layer_freq=1,
    n_group=1, n_routed_experts=384, n_shared_experts=1, norm_topk_prob=True, num_attention_heads=64, num_experts_per_tok=8,
    num_hidden_layers=61, num_key_value_heads=64, num_nextn_predict_layers=0, pretraining_tp=1, q_lora_rank=1536,
    qk_nope_head_dim=128, qk_rope_head_dim=64, rms_norm_eps=1e-05, rope_theta=50000.0, routed_scaling_factor=2.827,
    rope_scaling=dict(beta_fast=32.0, beta_slow=1.0, factor=64.0, mscale=1.0, mscale_all_dim=1.0, type="yarn",
                      original_max_position_embeddings=4096),
    scoring_func="sigmoid", seq_aux=True, tie_word_embeddings=False, topk_group=1, topk_method="noaux_tc", v_head_dim=128,
    vocab_size=163840, use_cache=True, auto_map={"AutoConfig": "x"}, _name_or_path="", add_cross_attention=False, top_k=50,
    bad_words_ids=None, id2label={"0": "LABEL_0"}, is_decoder=False, output_attentions=False, prefix=None, temperature=1.0,
    quantization_config=dict(
        quant_method="compressed-tensors", format="pack-quantized", quantization_status="compressed", kv_cache_scheme=None,
        ignore=["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
        config_groups={"group_0": dict(
            input_activations=None, output_activations=None, targets=["Linear"],
            weights=dict(num_bits=4, type="int", symmetric=True, strategy="group", group_size=32, dynamic=False, actorder=None,
                         block_structure=None, observer="minmax", observer_kwargs={}),
        )},
    ),
)  # fmt: skip


def parsed(raw: dict[str, Any], folder: Path) -> Any:
    (folder / "config.json").write_text(json.dumps(raw))
    return choose_target(folder).config


def test_published_configs_are_read(tmp_path: Path) -> None:
    """Keeps out: keys that every file has and nobody reads, ends of texts taken from the wrong config, a text's rope lost."""
    raw = dict(
        architectures=["Qwen3VLForConditionalGeneration"], model_type="qwen3_vl", text_config=QWEN3_VL,
        tie_word_embeddings=False, transformers_version="4.57.0.dev0", vision_config={"depth": 27}, **QWEN_TOKENS,
    )  # fmt: skip
    config = parsed(raw, tmp_path)
    assert (config.family, config.wrapper, config.qk_norm, config.rope.theta, config.rope.kind) == (
        "qwen3", "qwen3_vl", True, 5e6, "default",
    )  # fmt: skip
    assert (config.eos_ids, config.dtype, config.tie_embeddings, config.max_position) == ((151645,), "bfloat16", False, 262144)
    kimi = dict(
        architectures=["KimiK25ForConditionalGeneration"], auto_map={"AutoConfig": "x"}, bos_token_id=163584,
        dtype="bfloat16", eos_token_id=163586, ignore_index=-100, media_placeholder_token_id=163605, model_type="kimi_k25",
        pad_token_id=163839, text_config=KIMI, tie_word_embeddings=False, use_unified_vision_chunk=True,
        vision_config={"model_type": ""}, video_placeholder="<|kimi_k25_video_placeholder|>",
    )  # fmt: skip
    config = parsed(kimi, tmp_path)
    assert (config.family, config.latent_rank, config.experts.count, config.eos_ids) == ("deepseek_v3", 512, 384, (163586,))
    scheme = config.quantization
    layers = ("1.mlp.experts.0.up_proj", "1.self_attn.o_proj", "0.mlp.up_proj", "1.mlp.shared_experts.up_proj")
    found = [name for name in layers if scheme.format_of(f"model.layers.{name}", lambda _: True)]
    assert found == ["1.mlp.experts.0.up_proj"]
    assert scheme.format_of("lm_head", lambda _: True) is None


@pytest.mark.parametrize("begin", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("head", ["lm_head", "language_model.lm_head"])
def test_rules_about_matrices_fit_in_every_spelling(tmp_path: Path, begin: str, head: str) -> None:
    """Keeps out: a list of matrices that stay as they are, in names of another release than the file's."""
    kept = [head, f"{begin}layers.0.mlp.down_proj", "re:.*visual.*", "re:vision_tower.*", "model.vision_tower.x"]
    text = dict(
        model_type="llama", hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64
    )
    scheme = {**SCHEMES["fp8 channel"].config, "ignore": kept}
    raw = dict(model_type="llava", text_config={**text, "tie_word_embeddings": False}, quantization_config=scheme)
    quantization = parsed(raw, tmp_path).quantization
    named = ("lm_head", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj")
    assert [name for name in named if quantization.format_of(name, lambda _: True)] == ["model.layers.1.mlp.down_proj"]


@pytest.mark.parametrize(("name", "scheme"), [("qwen3_vl", "fp8 channel"), ("mistral3", "w4a16 g32 asym"), ("llava", "awq")])
def test_a_quantised_wrapper_s_numbers_and_bytes(tmp_path: Path, name: str, scheme: str) -> None:
    """Keeps out: scales that are looked for below another name, and a plan that counts images."""
    sizes: dict[str, Any] = dict(
        hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=16
    )
    model = wrapped_model(name, text=sizes | {"tie_word_embeddings": False}, tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "plain")
    own = SCHEMES[scheme]
    key = "modules_to_not_convert" if scheme == "awq" else "ignore"
    skipped = ["lm_head", "re:.*visual.*", "re:.*vision_tower.*", "re:.*multi_modal_projector.*"]
    plain = ["lm_head", "visual", "vision_tower", "multi_modal_projector"]
    own = own._replace(config={**own.config, key: plain if scheme == "awq" else skipped})
    folder = as_quantised(tmp_path / "plain", tmp_path / "quantised", own, "visual|vision_tower|multi_modal|lm_head")
    ids = torch.arange(1, 12)
    one, other = (our_logits(each, ids) for each in (tmp_path / "plain", folder))
    torch.testing.assert_close(other, one, atol=1e-5 * float(one.abs().max()), rtol=1e-5)


def test_images_are_named_by_inspect_and_plan(tmp_path: Path) -> None:
    """Keeps out: parameters of images counted among the target's, and bytes that nobody mentions."""
    wrapped_model("qwen3_vl").save_pretrained(tmp_path)
    images = [x for name, x in load_file(tmp_path / "model.safetensors").items() if ".visual." in name]
    size = sum(x.nbytes for x in images)
    facts, plan = target_facts(tmp_path), plan_memory(tmp_path, None, None, EngineOptions(max_seq_len=64), 10**10)
    assert (facts["family"], facts["wrapper"], plan.passed_over) == ("qwen3", "qwen3_vl", size)
    assert facts["architectures"] == ["Qwen3VLForConditionalGeneration"]
    assert facts["weights"]["passed over, of images"] == f"{len(images)} tensors, {size:,} bytes"


# A wrapper, keys of its config.json, keys of the config inside, and what is said of them.
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("qwen3_vl", {"deepstack": True}, {}, "unknown config keys deepstack"),
    ("qwen3_vl", {"hidden_size": 64}, {}, "hidden_size must be the same in text_config, got 64 and 32"),
    ("qwen3_vl", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, {}, "unknown config keys rope_scaling"),
    ("qwen3_vl", {"vision_config": []}, {}, "vision_config must be an object"),
    ("qwen3_vl", {"text_config": "x"}, {}, "text_config must be an object"),
    ("qwen3_vl", {"text_config": {}}, {}, "lacks text_config, of which a qwen3_vl model's config is made"),
    ("qwen3_vl", {"language_model_only": "yes"}, {}, "language_model_only must be true or false, got 'yes'"),
    ("qwen3_vl", {}, {"model_type": "qwen3"}, "text_config: model_type must be 'qwen3_vl_text', got 'qwen3'"),
    ("qwen3_vl", {}, {"use_sliding_window": True}, "use_sliding_window must be False or absent, got True: transformers' class"),
    ("qwen3_vl", {}, {"experts": 3}, "unknown config keys experts"),
    ("qwen3_vl", {}, {"num_hidden_layers": 5}, "num_hidden_layers is 5, but the checkpoint holds 4 layers"),
    ("qwen3_vl", {}, {"rope_parameters": {"mrope_section": "x"}}, "mrope_section must be three numbers of pairs, got 'x'"),
    ("qwen3_vl", {}, {"rope_parameters": {"mrope_section": [4, -2, 2]}}, "mrope_section must be three numbers of pairs"),
    ("qwen3_vl", {}, {"rope_parameters": {"rope_type": "mrope"}}, "rope type must be default, linear or llama3, got 'mrope'"),
    ("qwen3_vl_moe", {}, {"norm_topk_prob": False}, "norm_topk_prob must be True or absent, got False: transformers' class"),
    ("glm4v_moe", {}, {"use_qk_norm": True}, "use_qk_norm must be False or absent"),
    ("llava", {}, {"model_type": None}, "text_config lacks model_type; expected the name of a family, such as 'llama'"),
    ("llava", {}, {"model_type": "t5"}, "t5 is an encoder-decoder model"),
    ("llava", {}, {"model_type": "gemma2"}, "logits of a gemma2 model must be neither scaled nor capped within llava"),
    ("gemma3", {}, {"final_logit_softcapping": 30.0}, "nor capped within gemma3.*got final_logit_softcapping 30.0"),
    ("llava", {}, {"model_type": ["llama"]}, "model_type must be a string or null"),
    ("gemma3", {}, {"new_key": 1}, "unknown config keys new_key, which transformers does not read for a gemma3_text model"),
    ("gemma3", {}, {"hidden_size": -1}, "hidden_size must be a whole number of at least 1, got -1"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("wrappers")
    for name in {name for name, *_ in REFUSED}:
        wrapped_model(name).save_pretrained(root / name)
    return {name: root / name for name, *_ in REFUSED}


@pytest.mark.parametrize(("name", "outer", "inner", "said"), REFUSED)
def test_wrong_configs_are_refused(
    folders: dict[str, Path], tmp_path: Path, name: str, outer: dict[str, Any], inner: dict[str, Any], said: str
) -> None:
    raw = json.loads((folders[name] / "config.json").read_text())
    raw["text_config"].update(inner)
    (tmp_path / "config.json").write_text(json.dumps({**raw, **outer}))
    (tmp_path / "model.safetensors").symlink_to(folders[name] / "model.safetensors")
    with pytest.raises(ValueError, match=said):
        check_chosen(choose_target(tmp_path), tmp_path)


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3", "llava"])
def test_tensors_are_strict(folders: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Keeps out: a stray tensor that is taken for an image's, a missing one, one that stands there twice, a text's alone."""
    tensors = load_file(folders[name] / "model.safetensors")
    (tmp_path / "config.json").write_text((folders[name] / "config.json").read_text())
    text = next(each for each in tensors if each.endswith("layers.0.mlp.up_proj.weight"))

    def load(changed: dict[str, torch.Tensor]) -> None:
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        chosen = choose_target(tmp_path)
        load_chosen(chosen, tmp_path, 64, torch.device("cpu"), torch.float32, False, checked=check_chosen(chosen, tmp_path))

    for stray in (text.replace("up_proj", "extra"), "vision_extra.weight"):
        with pytest.raises(ValueError, match="1 tensors are not part of this architecture: .*extra"):
            load(tensors | {stray: torch.zeros(2)})
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj"):
        load({each: x for each, x in tensors.items() if each != text})
    with pytest.raises(ValueError, match="are one in the text model; expected each once"):
        load(tensors | {f"model.layers.{text.rpartition('layers.')[2]}": tensors[text].clone()})


def test_every_wrapper_is_tried() -> None:
    """Keeps out: a line of the table that no test loads; Qwen3.5's stand in tests of hybrids."""
    assert WRAPPERS.keys() - WRAPPED.keys() == {"qwen3_5", "qwen3_5_moe"}
    assert LEFT.keys() <= {*CONFIG_MAPPING} and not LEFT.keys() & WRAPPERS.keys()


def test_gemma4_s_wrapper_gives_its_text_model(tmp_path: Path) -> None:
    """Its config and its names."""
    text = {"model_type": "gemma4_text", "hidden_size": 32, "tie_word_embeddings": True}
    raw = dict(model_type="gemma4", text_config=text, audio_config=None, boa_token_id=3, eoa_token_index=4, vision_config={},
               audio_token_id=5, vision_soft_tokens_per_image=280)  # fmt: skip
    found = unwrapped(raw, "here")
    assert (found.config, found.wrapper, found.is_tied) == ({**text}, "gemma4", True)
    names = [
        "model.language_model.layers.0.layer_scalar",
        "model.embed_vision.x",
        "model.audio_tower.y",
        "model.vision_tower.z",
    ]
    own, over = WRAPPERS["gemma4"].split(dict.fromkeys(names, 0))
    assert (list(own), sorted(over)) == (["model.layers.0.layer_scalar"], sorted(names[1:]))
    assert family_of("gemma4") is None
