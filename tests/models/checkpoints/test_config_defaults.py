"""Numbers that a config.json may leave out, and numbers that no tiny model of the other tests has.  The oracle is transformers.

Exports leave out what equals a default, and tiny models are made of defaults.  So a switch that is read with another default,
or that a constant stands for, is right in every other test.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from toolkit.deepseek import DEEPSEEKS, save_deepseek
from toolkit.families import eager
from toolkit.models import COMMON, FAMILIES, save_target
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specdec.attention.eager.dense import DenseAttention
from specdec.models.bamba.config import parse_bamba
from specdec.models.config import ModelConfig
from specdec.models.deepseek.config import parse_deepseek
from specdec.models.diffllama.config import parse_diffllama
from specdec.models.falcon_h1.config import parse_falcon_h1
from specdec.models.gpt_oss.config import parse_gpt_oss
from specdec.models.granite_hybrid.config import parse_granite_hybrid
from specdec.models.kimi_linear.config import parse_kimi_linear
from specdec.models.layers import Rotary
from specdec.models.lfm2.config import parse_lfm2
from specdec.models.llama.config import parse_llama
from specdec.models.mixtures.loader import FAMILIES as MIXTURES
from specdec.models.nemotron_h.config import parse_nemotron_h
from specdec.models.olmo_hybrid.config import parse_olmo_hybrid
from specdec.models.registry import choose_target, load_chosen
from specdec.models.yarn import parse_rope_with_yarn

Parse = Callable[[dict[str, Any], str], ModelConfig]
PARSERS: dict[str, Parse] = {
    "LlamaConfig": parse_llama,
    "MistralConfig": parse_llama,
    "Qwen2Config": parse_llama,
    "Qwen3Config": parse_llama,
    "DiffLlamaConfig": parse_diffllama,
    "DeepseekV3Config": parse_deepseek,
    "DeepseekV32Config": parse_deepseek,
    "GlmMoeDsaConfig": parse_deepseek,
    "Glm4MoeLiteConfig": parse_deepseek,
    "GptOssConfig": parse_gpt_oss,
    "Qwen2MoeConfig": MIXTURES["qwen2_moe"].parse,
    "Qwen3MoeConfig": MIXTURES["qwen3_moe"].parse,
    "MixtralConfig": MIXTURES["mixtral"].parse,
    "Glm4MoeConfig": MIXTURES["glm4_moe"].parse,
    "Dots1Config": MIXTURES["dots1"].parse,
    "Ernie4_5_MoeConfig": MIXTURES["ernie4_5_moe"].parse,
    "HYV3Config": MIXTURES["hy_v3"].parse,
    "OlmoeConfig": MIXTURES["olmoe"].parse,
    "MiniMaxM2Config": MIXTURES["minimax_m2"].parse,
    "Lfm2Config": parse_lfm2,
    "Lfm2MoeConfig": parse_lfm2,
    "GraniteMoeHybridConfig": parse_granite_hybrid,
    "NemotronHConfig": parse_nemotron_h,
    "FalconH1Config": parse_falcon_h1,
    "BambaConfig": parse_bamba,
    "OlmoHybridConfig": parse_olmo_hybrid,
    "KimiLinearConfig": parse_kimi_linear,
}
# Fields that say less where the config does: nothing ends a text, texts are shorter, no layers of MTP are there.
CAUTIOUS = ("eos_ids", "max_position", "mtp_layers")
# What configs of a class need beside its own sizes: half of a head of 42 values can't be turned, and no number of experts is 0.
WANTING: dict[str, dict[str, Any]] = {
    "Glm4MoeConfig": {"head_dim": 128},
    "Lfm2Config": {"layer_types": None, "full_attn_idxs": [2]},  # the class has attention in all layers
    "OlmoHybridConfig": {"rope_parameters": None},  # no rope, as released checkpoints have it; the class turns heads
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"] * 16},
    "GraniteMoeHybridConfig": {"layer_types": ["mamba", "attention"] * 16},
    "BambaConfig": {"attn_layer_indices": [2]},
    "Dots1Config": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
}
# No config is written without them: the class's own number is that of one model.
ALWAYS = ("num_key_value_heads",)


@pytest.mark.parametrize("name", [name for name in PARSERS if hasattr(transformers, name)])
def test_a_key_that_is_left_out_means_transformers_default(name: str) -> None:
    """Keeps out: windows, biases, scalings or an epsilon that a config without their key gets or loses."""
    parse, raw = PARSERS[name], getattr(transformers, name)().to_diff_dict()
    raw |= WANTING.get(name, {})
    if raw.get("use_sliding_window") is False:  # switched on, so that the other keys of windows mean something
        on = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}
        raw |= {key: value for key, value in on.items() if key in raw}
    whole, read = parse(raw, "here"), 0
    for key in raw.keys() - {"model_type", "use_sliding_window", *ALWAYS}:
        try:
            got = parse({other: value for other, value in raw.items() if other != key}, "here")
        except ValueError as error:
            assert key in str(error) or key.partition("_")[0] in str(error), (key, error)
            continue
        read += 1
        differs = [each.name for each in dataclasses.fields(got) if getattr(got, each.name) != getattr(whole, each.name)]
        assert not set(differs) - set(CAUTIOUS), (key, differs)
    assert read > 5


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_an_attention_bias_is_where_transformers_has_it(name: str) -> None:
    """Keeps out: a family whose class knows no bias of the output projection, of which one is then asked for."""
    config_class, model_class, own = FAMILIES[name]
    config = config_class(**{**COMMON, **own, "attention_bias": True, "num_hidden_layers": 1, "layer_types": None})
    with torch.device("meta"):
        theirs = model_class(config).model.layers[0].self_attn
    assert parse_llama(config.to_diff_dict(), "here").o_bias == (theirs.o_proj.bias is not None)


def test_mimo_has_qwen2_s_biases_though_its_config_says_nothing() -> None:
    """Keeps out: MiMo's projections without the biases that its layers, which are Qwen2's, always have."""
    raw = transformers.Qwen2Config().to_diff_dict()
    qwen2, mimo = parse_llama(raw, "here"), parse_llama({**raw, "model_type": "mimo"}, "here")
    assert mimo == dataclasses.replace(qwen2, family="mimo") and mimo.qkv_bias


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
YARNS: list[dict[str, Any]] = [
    {},
    {"beta_fast": 20, "beta_slow": 2},
    {"truncate": False},
    {"attention_factor": 1.5},
    {"mscale": 0.7, "mscale_all_dim": 1.2},
    {"original_max_position_embeddings": 8192, "factor": 32.0, "rope_theta": 150.0},  # the blend goes beyond the last dim
]


@pytest.mark.parametrize("more", YARNS, ids=str)
@pytest.mark.parametrize("head_dim", [8, 64])
def test_yarn_s_tables_are_those_of_transformers(more: dict[str, Any], head_dim: int) -> None:
    """Keeps out: an end of the blend, a rounding of it, or an amplitude that only long texts would show."""
    parameters = {**YARN, **more}
    config = LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=512,
        rope_parameters=parameters,
    )
    positions = torch.tensor([[0, 1, 31, 64, 300]])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    got_cos, got_sin = (
        Rotary(parse_rope_with_yarn({"rope_parameters": parameters}, "here"), head_dim, 301).at(positions[0]).cos_sin
    )
    sign = torch.cat((-torch.ones(head_dim // 2), torch.ones(head_dim // 2)))
    torch.testing.assert_close(got_cos[:, 0], cos[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(got_sin[:, 0] * sign, sin[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama", "qwen3", "diffllama", "v3"])
def test_every_norm_has_the_config_s_epsilon(tmp_path: Path, name: str) -> None:
    """Keeps out: a norm, that of heads or the last one, with an epsilon of its own; those of latents have one."""
    save = save_deepseek if name in DEEPSEEKS else save_target
    folder, ids = save(tmp_path, name, rms_norm_eps=0.5), torch.arange(9)
    model = load_chosen(choose_target(folder), folder, 16, torch.device("cpu"), torch.float32, False)
    with torch.inference_mode():
        hidden_TH = model(ids, ids, DenseAttention(model.config.layer_kinds)).hidden_TH
        torch.testing.assert_close(model.logits(hidden_TH), eager(folder)(ids[None]).logits[0], atol=1e-4, rtol=1e-4)
