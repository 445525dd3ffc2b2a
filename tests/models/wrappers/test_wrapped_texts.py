"""Texts without images: what specdec makes of a wrapper's folder is what transformers' own class of the wrapper does.

Keeps out: positions in three kinds that differ from plain ones, keys of the text model's class that mean something else in the
family that computes it, tensors of images that are an error or vanish without a word.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.families import MARGIN
from toolkit.models import save_eagle3
from toolkit.wrappers.published import PUBLISHED, as_published
from toolkit.wrappers.wrapped import WRAPPED, our_logits, own_logits, wrapped_model
from transformers import PreTrainedModel

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.models.registry import choose_target, family_of

USUAL = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "gemma3", "gemma4", "glm4v_moe", "kimi_k25", "llama4", "mistral3")
OTHERS = tuple(name for name in WRAPPED if name not in USUAL)


def assert_texts(model: PreTrainedModel, prompt: list[int], text: list[int]) -> None:
    """Each token is the best one after all before it, by the wrapper's own class."""
    logits = own_logits(model, torch.tensor([prompt + text]))[0, len(prompt) - 1 : -1]
    best, second = logits.topk(2).values.unbind(-1)
    assert (best - second).min() > MARGIN, "a near-tie: choose another seed"
    assert text == logits.argmax(-1).tolist()


def check(name: str, folder: Path, **more: Any) -> None:
    model = wrapped_model(name, **more)
    model.save_pretrained(folder)
    ids = torch.randint(40, (1, 21), generator=torch.Generator().manual_seed(3))
    chosen, want = choose_target(folder), own_logits(model, ids)[0]
    assert (chosen.config.wrapper, chosen.native) == (name, family_of(chosen.config.family))
    with pytest.warns(UserWarning, match=r"texts alone are read: \d+ tensors of [\d,]+ bytes are passed over"):
        got = our_logits(folder, ids[0])
    torch.testing.assert_close(got, want, atol=3e-5 * float(want.abs().max()), rtol=1e-4)
    with SpecDecoder.from_pretrained(folder, device="cpu", dtype="float32", max_seq_len=64) as decoder:
        (out,) = decoder.generate([ids[0].tolist()], SamplingParams(max_tokens=12))
    assert_texts(model, ids[0].tolist(), out.token_ids)


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize("name", USUAL)
def test_texts_are_the_wrapper_s_own(tmp_path: Path, name: str) -> None:
    check(name, tmp_path)


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", OTHERS)
def test_texts_are_the_wrapper_s_own_of_others(tmp_path: Path, name: str) -> None:
    check(name, tmp_path)


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_names_are_the_same_model(tmp_path: Path, name: str) -> None:
    """Keeps out: experts that lie by columns read by rows, flat configs, names of older files that are left over."""
    wrapped_model(name.partition(" ")[0]).save_pretrained(tmp_path / "saved")
    as_published(name, tmp_path / "saved", tmp_path / "published")
    ids = torch.randint(40, (9,), generator=torch.Generator().manual_seed(4))
    one, other = (our_logits(folder, ids) for folder in (tmp_path / "saved", tmp_path / "published"))
    torch.testing.assert_close(one, other, atol=0, rtol=0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("said", [True, False])
def test_files_decide_where_two_configs_disagree_about_the_output_layer(tmp_path: Path, tied: bool, said: bool) -> None:
    """transformers' own files disagree: Mistral 3's wrapper says true by default, and Qwen3-VL-MoE's text model does."""
    model = wrapped_model("mistral3", text={"tie_word_embeddings": not said}, tie_word_embeddings=tied)
    model.config.tie_word_embeddings = said
    model.save_pretrained(tmp_path)
    chosen = choose_target(tmp_path)
    assert chosen.config.tie_embeddings == tied
    ids = torch.arange(1, 20)
    want = own_logits(model, ids[None])[0]
    torch.testing.assert_close(our_logits(tmp_path, ids), want, atol=3e-5 * float(want.abs().max()), rtol=1e-4)


@pytest.mark.slow_cases
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_a_head_trained_on_a_wrapper_drafts_for_it(tmp_path: Path, name: str) -> None:
    """Keeps out: a head refused for the sections of positions in its rope, for its target's name, or for its text_config."""
    model = wrapped_model(name)
    model.save_pretrained(tmp_path / "target")
    config = choose_target(tmp_path / "target").config
    text = json.loads((tmp_path / "target" / "config.json").read_text())["text_config"]
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "config.json").write_text(json.dumps({**text, "rope_parameters": None, "rope_theta": 1e4}))
    rope = {"type": "mrope", "mrope_section": [4, 2, 2]}
    head = save_eagle3(
        tmp_path / "head", tmp_path / "text", rope_scaling=rope, rope_theta=1e4, target_model_type=name,
        target_hidden_size=config.hidden_size, intermediate_size=48,
    )  # fmt: skip
    raw = json.loads((head / "config.json").read_text())
    inside = {key: raw.pop(key) for key in ("hidden_size", "target_hidden_size", "num_attention_heads", "vocab_size")}
    prompt, texts = list(range(1, 20)), []
    for said in (raw | inside, raw | {"text_config": inside, "vision_config": {}, "image_token_id": 3}):
        (head / "config.json").write_text(json.dumps(said))
        with SpecDecoder.from_pretrained(
            tmp_path / "target", head, SpecConfig(3, 2, 6), device="cpu", dtype="float32", max_seq_len=64
        ) as decoder:
            texts.append(decoder.generate([prompt], SamplingParams(max_tokens=12))[0].token_ids)
    assert texts[0] == texts[1]
    assert_texts(model, prompt, texts[0])
    (head / "config.json").write_text(json.dumps(raw | inside | {"text_config": {"hidden_size": 64}}))
    with pytest.raises(ValueError, match="hidden_size must be the same in text_config, got 32 and 64"):
        SpecDecoder.from_pretrained(tmp_path / "target", head, device="cpu")


def test_a_wrapper_s_text_model_drafts(tmp_path: Path) -> None:
    """Keeps out: a wrapper's folder as draft= that is taken for a draft head whose fc is missing."""
    for name in ("qwen3_vl", "gemma3"):
        wrapped_model(name).save_pretrained(tmp_path / name)
    settings = dict(device="cpu", dtype="float32", max_seq_len=64, smoke=False)
    with (
        pytest.warns(UserWarning, match="texts alone are read"),
        SpecDecoder.from_pretrained(tmp_path / "gemma3", tmp_path / "qwen3_vl", SpecConfig(3, 2, 6), **settings) as decoder,  # type: ignore[arg-type]
    ):
        drafted, plain = (decoder.generate([[5, 9, 2]], SamplingParams(max_tokens=12), speculate=s)[0] for s in (True, False))
    assert drafted.token_ids == plain.token_ids and drafted.stats.rounds > 0
