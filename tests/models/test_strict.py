"""Targets load whole or not at all: every tensor and every config key is used, or the error names it.

Keeps out: a model that loads with a part left out, and writes plausible text of another model.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit.checkpoints.load import load_target, read_target_config
from toolkit.models import Zoo, save_target
from torch import Tensor

from specdec import SpecDecoder
from specdec.attention.kinds import FULL, LayerKind
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.llama.config import parse_llama

Tensors = dict[str, Tensor]


def load(folder: Path) -> Tensors:
    """The weights that the model has then."""
    return load_target(folder, read_target_config(folder), 64, torch.device("cpu"), torch.float32).state_dict()


def change_weights(folder: Path, change: Callable[[Tensors], Any]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def change_config(folder: Path, **changes: Any) -> Path:
    raw = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in {**raw, **changes}.items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


LAYER = "model.layers.1"
WEIGHT_ERRORS: list[tuple[str, Callable[[Tensors], Any], str]] = [
    ("llama", lambda t: t.pop(f"{LAYER}.mlp.up_proj.weight"), "'model.layers.1.mlp.up_proj.weight' is missing"),
    ("llama", lambda t: t.pop("lm_head.weight"), "'lm_head.weight' is missing"),
    ("qwen2", lambda t: t.pop(f"{LAYER}.self_attn.k_proj.bias"), "k_proj.bias' is missing"),
    ("qwen3", lambda t: t.pop(f"{LAYER}.self_attn.q_norm.weight"), "q_norm.weight' is missing"),
    ("llama", lambda t: t.update({"model.layers.4.mlp.up_proj.weight": torch.ones(2)}), "1 tensors are not part .*layers.4"),
    ("llama", lambda t: t.update({f"{LAYER}.self_attn.q_proj.bias": torch.ones(32)}), "not part .*q_proj.bias"),
    ("mistral", lambda t: t.update({f"{LAYER}.self_attn.q_norm.weight": torch.ones(16)}), "not part .*q_norm"),
    ("llama", lambda t: t.update({"model.norm.weight": torch.ones(33)}), r"'model.norm.weight' .* \(32,\), got \(33,\)"),
    (
        "llama",
        lambda t: t.update({f"{LAYER}.self_attn.k_proj.weight": torch.ones(32, 32)}),
        r"k_proj.weight' must have shape \(16, 32\), got \(32, 32\)",
    ),
    ("qwen2", lambda t: t.update({"lm_head.weight": torch.ones(40, 48)}), "ties lm_head to the embeddings, but"),
]


@pytest.mark.parametrize(("name", "change", "match"), WEIGHT_ERRORS)
def test_weights(tmp_path: Path, name: str, change: Callable[[Tensors], Any], match: str) -> None:
    with pytest.raises(ValueError, match=match) as info:
        load(change_weights(save_target(tmp_path, name), change))
    assert str(tmp_path) in str(info.value)


def test_harmless_extras_load(tmp_path: Path) -> None:
    """A tied head written out, and the rotary buffer of old exports."""
    folder = save_target(tmp_path, "qwen2")
    want = load(folder)
    change_weights(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    change_weights(folder, lambda t: t.update({f"{LAYER}.self_attn.rotary_emb.inv_freq": torch.ones(6)}))
    found = load(folder)
    assert found.keys() == want.keys() and all(torch.equal(found[name], want[name]) for name in want)


def test_an_index_of_a_subfolder_loads(tmp_path: Path, zoo: Zoo) -> None:
    """Keeps out: an index whose files lie deeper refused, or read from elsewhere."""
    shutil.copytree(zoo.target("llama"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "shards").mkdir()
    (tmp_path / "model.safetensors").rename(tmp_path / "shards" / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": "shards/a.safetensors"}}')
    found, want = (load(folder) for folder in (tmp_path, zoo.target("llama")))
    assert found.keys() == want.keys() and all(torch.equal(found[name], want[name]) for name in want)


CONFIG_ERRORS: list[tuple[str, dict[str, Any], str]] = [
    ("llama", dict(model_type="gpt2"), "model_type must be one of llama, mistral, qwen2, qwen3, mimo, got 'gpt2'"),
    ("llama", dict(model_type="absent"), "model_type must be .* got None"),
    ("llama", dict(quantization_config={"quant_method": "hqq"}), "quant_method must be one of .* got 'hqq'"),
    ("llama", dict(hidden_act="gelu"), "hidden_act must be 'silu', got 'gelu'"),
    ("llama", dict(vocab_size="absent"), "config.json lacks vocab_size"),
    ("llama", dict(num_key_value_heads=3), "multiple of num_key_value_heads, got 4, 3"),
    ("llama", dict(head_dim=7), "head_dim must be even .* got 7"),
    ("llama", dict(rope_parameters={"rope_type": "yarn", "factor": 4.0}), "rope type must be .* got 'yarn'"),
    ("llama", dict(rope_parameters=None, rope_scaling={"type": "dynamic", "factor": 2.0}), "rope type .* got 'dynamic'"),
    ("llama", dict(partial_rotary_factor=0.5), "partial_rotary_factor must be absent or 1"),
    ("llama", dict(rope_parameters={"rope_type": "llama3", "factor": 8.0}), "low_freq_factor"),
]


@pytest.mark.parametrize(("name", "changes", "match"), CONFIG_ERRORS, ids=str)
def test_config(tmp_path: Path, name: str, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        load(change_config(save_target(tmp_path, name), **changes))


def test_a_key_that_would_change_the_computation_is_refused(tmp_path: Path) -> None:
    """Keeps out: keys of other models (logit scales, softcaps, experts) read by nobody."""
    folder = save_target(tmp_path, "llama")
    for key, value in {"logit_scale": 0.5, "attn_logit_softcapping": 30.0, "num_local_experts": 8, "mystery": 1}.items():
        with pytest.raises(ValueError, match=key):
            load(change_config(folder, **{key: value}))
        change_config(folder, **{key: "absent"})


def test_files(tmp_path: Path, zoo: Zoo) -> None:
    """No config, broken config, no weights, a shard that is not there."""
    with pytest.raises(ValueError, match="config.json does not exist; expected a Hugging Face model folder"):
        load(tmp_path)
    config = tmp_path / "config.json"
    for text, match in (("{", "not valid JSON"), ("[]", "must hold a JSON object, got list")):
        config.write_text(text)
        with pytest.raises(ValueError, match=match):
            load(tmp_path)
    config.write_text((zoo.target("llama") / "config.json").read_text())
    with pytest.raises(ValueError, match="holds no weights: expected .*safetensors"):
        load(tmp_path)
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="names files that do not exist: model-00001-of-00002"):
        load(tmp_path)


def test_what_a_config_means() -> None:
    """Keeps out: switches of one family read into another."""
    base = dict(hidden_size=32, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4, vocab_size=9)
    config = parse_llama({**base, "model_type": "mistral", "sliding_window": 16, "eos_token_id": [1, 2]}, "x")
    assert config.layer_kinds == (LayerKind(window=16),) and config.head_dim == 8 and config.num_kv_heads == 4
    assert config.eos_ids == (1, 2)
    absent = parse_llama({**base, "model_type": "mistral"}, "x")
    assert absent.layer_kinds == (LayerKind(window=4096),)  # what transformers takes
    assert parse_llama({**base, "model_type": "mistral", "sliding_window": None}, "x").layer_kinds == (FULL,)
    qwen = {**base, "model_type": "qwen2", "sliding_window": 16, "num_hidden_layers": 3, "max_window_layers": 2}
    assert parse_llama(qwen, "x").layer_kinds == (FULL,) * 3
    windowed = parse_llama({**qwen, "use_sliding_window": True}, "x")
    assert windowed.layer_kinds == (FULL, FULL, LayerKind(window=16)) and windowed.qkv_bias and not windowed.o_bias
    types = ["sliding_attention", "full_attention", "full_attention"]
    named = parse_llama({**qwen, "use_sliding_window": True, "layer_types": types}, "x")
    assert named.layer_kinds == (LayerKind(window=16), FULL, FULL)
    assert parse_llama({**base, "model_type": "llama", "eos_token_id": 7}, "x").eos_ids == (7,)


def test_a_cut_off_file_is_named(tmp_path: Path) -> None:
    """Keeps out: a traceback from deep inside safetensors for a download that broke off."""
    (tmp_path / "model.safetensors").write_bytes(b"\x10\x27\x00\x00\x00\x00\x00\x00{")
    with pytest.raises(ValueError, match="model.safetensors is no whole safetensors file"):
        Checkpoint(tmp_path)


def test_generation_config_ends_texts_by_token_ids(tmp_path: Path) -> None:
    """Keeps out: an end of text that is accepted and never found, such as "0"."""
    folder = save_target(tmp_path, "llama")
    for value in ("0", [0, 0.5], 40, -1):
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
        with pytest.raises(ValueError, match=r"generation_config.json: eos_token_id must be .* in \[0, 39\] .*, got ") as info:
            read_target_config(folder)
        assert repr(value) in str(info.value)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 39]}))
    assert read_target_config(folder).eos_ids == (0, 39)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (dict(target=None), r"target.* must be a folder or a hub id, a str or a Path; got None of type NoneType"),
        (dict(draft=3), r"draft.* must be a folder or a hub id, a str or a Path; got 3 of type int"),
        (dict(draft=b"x"), r"draft.* must be a folder or a hub id, .* of type bytes"),
        (dict(attention=["torch"]), r"attention must be 'auto', 'torch', .*, got \['torch'\] of type list"),
        (dict(attention=None), r"attention must be 'auto', .*, got None of type NoneType"),
    ],
)
def test_arguments_of_another_type(zoo: Zoo, arguments: dict[str, Any], match: str) -> None:
    """Keeps out: "unhashable type" and "expected str, bytes or os.PathLike", which name no argument."""
    with pytest.raises(TypeError, match=match):
        SpecDecoder.from_pretrained(**{"target": zoo.target("llama"), "device": "cpu", **arguments})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 0}, "sliding_window must be a positive number of tokens or null, got 0"),
        ({"sliding_window": "big"}, "sliding_window must be a positive number"),
        ({"layer_types": ["full_attention"]}, "a mistral model's layers are all alike"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types must be 1 of"),
        ({"model_type": "llama", "layer_types": ["sliding_attention"]}, "a llama model's layers are all alike"),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"]}, "no sliding_window is switched on"),
        ({"model_type": "qwen3", "layer_types": ["chunked_attention"]}, "layer_types must be 1 of"),
    ],
)
def test_windows_that_contradict_themselves(changes: dict[str, object], message: str) -> None:
    """Keeps out: full attention where the model has a window, or the reverse, from a config read in part."""
    base = dict(hidden_size=32, intermediate_size=8, num_hidden_layers=1, num_attention_heads=4, vocab_size=9)
    with pytest.raises(ValueError, match=message):
        parse_llama({**base, "model_type": "mistral", "sliding_window": 8, **changes}, "x")
