"""DiffLlama targets with options that transformers' class does not have, against their definition in float64.

Keeps out: an option that is read and not computed, or computed in one of the two softmaxes alone.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from toolkit.differential.defined import NORM, OPTIONS, OptionsZoo, save_with_options, share
from toolkit.models import ragged_prompts
from toolkit.prompts import dense_logits, paged_logits

from specdec import SamplingParams, SpecConfig
from specdec.loading.about.inspect_target import target_facts
from specdec.models.causal_lm import CausalLM
from specdec.models.kv import make_cache
from specdec.models.registry import choose_target, load_chosen

CPU = torch.device("cpu")
PROMPTS = ragged_prompts(40, 4, seed=3)
SHAPES = {"tree": SpecConfig(4, 4, 16), "chain": SpecConfig(3, 1, 4)}


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> OptionsZoo:
    return OptionsZoo(tmp_path_factory.mktemp("options"))


def drop(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load(zoo: OptionsZoo, name: str) -> CausalLM:
    return load_folder(zoo.target(name))


def load_folder(folder: Path) -> CausalLM:
    target = load_chosen(choose_target(folder, "native"), folder, 256, CPU, torch.float32, cuda_graphs=False)
    assert isinstance(target, CausalLM)
    return target


@pytest.mark.parametrize("name", OPTIONS)
@torch.inference_mode()
def test_logits_are_those_of_the_definition(zoo: OptionsZoo, name: str) -> None:
    """In one pass, in chunks of a prompt, and without a cache."""
    model, defined = load(zoo, name), zoo.defined(name)
    want = torch.cat([defined.logits(prompt) for prompt in PROMPTS]).float()
    close = dict(atol=3e-5 * float(want.abs().max()), rtol=1e-4)  # norms magnify the rounding of differences
    torch.testing.assert_close(paged_logits(model, PROMPTS), want, **close)
    torch.testing.assert_close(paged_logits(model, PROMPTS, chunk=9, page_size=4), want, **close)
    torch.testing.assert_close(dense_logits(model, PROMPTS[-1]), want[-len(PROMPTS[-1]) :], **close)
    ends = torch.tensor([len(prompt) for prompt in PROMPTS]).cumsum(0) - 1
    torch.testing.assert_close(paged_logits(model, PROMPTS, last=True), want[ends], **close)


TEXTS = [
    ("norm", "eagle3", "tree", 16), ("windows", "eagle3", "tree", 4), ("all windows", "eagle1", "chain", 1),
    ("softcap", "eagle3", "tree", 1), ("all options", "eagle1", "tree", 5),
    ("shared", "eagle3", "tree", 16), ("shared pairs", "eagle1", "tree", 4), ("shared, capped", "eagle3", "chain", 1),
    ("alibi", "eagle3", "tree", 4), ("alibi, many", "eagle1", "tree", 16),
]  # fmt: skip


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(("name", "head", "shape", "page_size"), TEXTS)
def test_text_is_that_of_the_definition(zoo: OptionsZoo, name: str, head: str, shape: str, page_size: int) -> None:
    """Keeps out: nodes of a tree, or prompts in chunks, that read other keys than plain decoding does."""
    decoder = zoo.decoder(name, head, SHAPES[shape], page_size=page_size, max_batch_size=2)
    outputs = decoder.generate(PROMPTS, SamplingParams(max_tokens=10))
    assert [out.token_ids for out in outputs] == [zoo.defined(name).greedy(prompt, 10) for prompt in PROMPTS]


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(
    ("name", "kept", "shape", "rounds"),
    [("plain", "int8", "tree", False), ("all options", "fp8", "tree", False), ("shared", "int8", "chain", True)],
)
def test_text_over_8_bit_caches_does_not_depend_on_drafts(
    zoo: OptionsZoo, name: str, kept: str, shape: str, rounds: bool
) -> None:
    """Keeps out: nodes of a tree that are read in another precision than the committed text, and near-ties taken for faults."""
    settings = dict(page_size=4, max_batch_size=2, kv_cache_dtype=kept, int8_queries=rounds)
    decoder = zoo.decoder(name, "eagle3", SHAPES[shape], **settings)
    drafted, plain = (
        [out.token_ids for out in decoder.generate(PROMPTS, SamplingParams(max_tokens=12), speculate=speculate)]
        for speculate in (True, False)
    )
    assert drafted == plain
    if kept == "int8" and not rounds:  # near enough to the definition, which keeps all numbers as they are
        defined = [zoo.defined(name).greedy(prompt, 2) for prompt in PROMPTS]
        assert sum(got[:2] == want for got, want in zip(drafted, defined, strict=True)) >= len(PROMPTS) - 1


# ---- shared keys and values ----


@torch.inference_mode()
def test_copied_weights_are_the_same_model(zoo: OptionsZoo, tmp_path: Path) -> None:
    """Layers 1 and 3 share what layers 0 and 2 read: where layers 0 and 2 add nothing to the stream, layers 1 and 3 would
    compute the same keys and values from copies of the weights."""
    copies = save_with_options(tmp_path / "copies", "diffllama-gqa")
    tensors = load_file(copies / "model.safetensors")
    for source, layer in ((0, 1), (2, 3)):
        for name in list(tensors):
            if name.startswith(f"model.layers.{source}.") and re.search(r"input_layernorm|k_proj|v_proj", name):
                tensors[name.replace(f".{source}.", f".{layer}.")] = tensors[name].clone()
            if name.startswith(f"model.layers.{source}.") and re.search(r"o_proj|down_proj", name):
                tensors[name].zero_()
    save_file(tensors, copies / "model.safetensors", metadata={"format": "pt"})
    shared = shutil.copytree(copies, tmp_path / "shared")
    share(shared, [0, 0, 2, 2])
    want, got = (paged_logits(load_folder(folder), PROMPTS) for folder in (copies, shared))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_sharing_layers_store_nothing_and_run_the_last_token(zoo: OptionsZoo) -> None:
    """Keeps out: a sharing layer that takes memory, and one that computes rows of a prompt which nobody reads."""
    model, rows = load(zoo, "shared"), list[int]()
    cache = make_cache(model, model.config, 12, "auto", torch.float32, CPU)
    assert cache.bytes == 12 * 2 * 2 * model.config.num_kv_heads * model.config.head_dim * 4
    assert cache.view(2) is cache.view(3) is cache.view(1) is not cache.view(0)
    for layer in model.layers:
        layer.mlp.register_forward_hook(lambda module, args, out: rows.append(len(out)))
    paged_logits(model, PROMPTS, last=True)
    T, R = sum(map(len, PROMPTS)), len(PROMPTS)
    assert rows == [T, T, R, R]


def test_inspect_names_the_options(zoo: OptionsZoo) -> None:
    """Keeps out: roots of distances shown as distances, and differential attention shown as that of a Llama."""
    shown = [target_facts(zoo.target(name))["target"] for name in ("alibi", "alibi, many")]
    assert [each["rope"] for each in shown] == ["none: ALiBi", "none: ALiBi of roots of distances"]
    assert {each["attention"] for each in shown} == {"heads in pairs, one softmax minus another"}


# ---- what is refused ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_windows": [8, None]}, "attention_windows must be null or a list of 4 entries, one a layer"),
        ({"attention_windows": 8}, "attention_windows must be null or a list of 4 entries.*got 8"),
        ({"attention_windows": [8, 0, None, None]}, "attention_windows must be .* a positive number"),
        ({"attention_windows": [8, True, None, None]}, "attention_windows must be .* a positive number"),
        ({"attention_windows": [8, 2**31, None, None]}, "attention_windows must be .* a positive number"),
        ({"kv_source": [0, 2, 2, 2]}, r"kv_source\[1\] must be 1 or the number of an earlier layer, got 2"),
        (
            {"kv_source": [0, 1, 1, 1], "attention_windows": [None, None, None, 8]},
            r"layer 3 \(window 8\) shares the keys and values of layer 1 \(full\)",
        ),
        ({"attention_alibi": True, "rope_parameters": None}, "attention_alibi must be null or one of linear, sqrt, got True"),
        ({"attention_alibi": "linear"}, "rope_parameters must be absent or null with attention_alibi"),
        ({"attention_softcap": 0}, "attention_softcap must be"),
        ({"attention_softcap": "3"}, "attention_softcap must be"),
    ],
    ids=str,
)
def test_broken_options_are_refused(zoo: OptionsZoo, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    raw = json.loads((zoo.target("plain") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | change))
    with pytest.raises(ValueError, match=message):
        choose_target(tmp_path)


def test_only_our_own_modules_read_the_options(zoo: OptionsZoo) -> None:
    """Keeps out: transformers' code, which would ignore them in silence."""
    for name, key in (("windows", "attention_windows"), ("softcap", "attention_softcap"), ("alibi", "attention_alibi")):
        with pytest.raises(ValueError, match=f"unknown config keys {key}"):
            choose_target(zoo.target(name), "transformers")


def test_every_layer_has_a_weight_or_none(zoo: OptionsZoo, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keeps out: a weight that one layer lacks, taken as ones, and one that is left over."""
    for gone, message in ((3, "layers.3.self_attn.subln.weight.*missing"), (0, "layers.1.self_attn.subln.weight")):
        broken = OptionsZoo(tmp_path_factory.mktemp("broken"))
        folder = broken.target("norm")
        drop(folder, f"model.layers.{gone}.self_attn.{NORM}")
        with pytest.raises(ValueError, match=message):
            load(broken, "norm")
