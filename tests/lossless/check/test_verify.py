"""`specdec verify`: right decoders pass, and planted faults of a round are told from rounding, in 16 bit and over 8-bit KV."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit.deepseek import DeepseekZoo
from toolkit.inside.round_faults import FAULTS, fault
from toolkit.models import Zoo, ragged_prompts

from specdec import SamplingParams, SpecConfig, SpecDecoder, cli
from specdec.lossless import reference
from specdec.lossless.choice import GeneratedText
from specdec.lossless.reference import passes_of, read_text
from specdec.lossless.widen import widened
from specdec.session import Session

PROMPTS = ragged_prompts(40, 8)
GREEDY, SAMPLED = SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=0.9, top_p=0.9, top_k=20, seed=3)


def decoder_of(zoo: Zoo, dtype: str, kv: str = "auto") -> SpecDecoder:
    return zoo.decoder("llama", "eagle1", SpecConfig(3, 8, 40), dtype=dtype, kv_cache_dtype=kv)


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(
    ("dtype", "kv", "sampling"),
    [
        ("float32", "auto", GREEDY), ("float32", "auto", SAMPLED), ("bfloat16", "auto", SAMPLED), ("float16", "int8", GREEDY),
        ("bfloat16", "fp8", SAMPLED),
    ],
)  # fmt: skip
def test_a_right_decoder_passes(zoo: Zoo, dtype: str, kv: str, sampling: SamplingParams) -> None:
    """Keeps out: rounding called an error."""
    found = decoder_of(zoo, dtype, kv).verify(PROMPTS, sampling)
    assert found.passed, found.prompts
    longer = sum(each.difference is not None for each in found.prompts)
    assert found.tokens == 24 * (8 + longer) and found.accept_length > 1 and found.accepted > 0
    assert all(each.bound > 0 for each in found.prompts)
    if dtype == "float32":
        assert found.count("EXACT") == 8 and found.unsure == 0 and max(each.bound for each in found.prompts) < 1e-3


@pytest.mark.parametrize(
    "rule", [{"logit_bias": {3: 2.0}}, {"repetition_penalty": 1.4}, {"min_tokens": 6}, {"bad_words": [[5]]}]
)
def test_rules_for_single_tokens_are_judged_too(zoo: Zoo, rule: dict[str, Any]) -> None:
    """Keeps out: places inside the prompt, which the noise is measured at, taken for places of the output."""
    found = decoder_of(zoo, "float32").verify(PROMPTS[:3], SamplingParams(max_tokens=10, **rule))
    assert found.passed and found.count("EXACT") == 3, found.prompts


# ---- faults, one for each part of a round ----


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(
    ("name", "dtype", "kv"),
    [*((name, "bfloat16", "auto") for name in FAULTS), ("position", "bfloat16", "int8"), ("stale keys", "float32", "auto")],
)
def test_a_logic_error_is_not_taken_for_rounding(zoo: Zoo, name: str, dtype: str, kv: str) -> None:
    """Keeps out: a bound so wide that it hides what the check is for.  Most prompts must show the fault, not one by luck."""
    with fault(name):
        found = decoder_of(zoo, dtype, kv).verify(PROMPTS, GREEDY)
    wrong = found.count("DIVERGED") + found.count("OFF TARGET")
    assert not found.passed and wrong >= 4, [each.verdict for each in found.prompts]
    if name == "both sides":
        assert found.count("OFF TARGET") >= 4, [each.verdict for each in found.prompts]


def test_a_router_that_flips_is_rounding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: mixtures of experts called wrong because two experts tie; and a bound that hides faults there."""
    prompts = ragged_prompts(40, 3, seed=10)
    decoder = DeepseekZoo(tmp_path).decoder("v3", "eagle3", SpecConfig(3, 4, 12), dtype="bfloat16")
    assert decoder.verify(prompts, GREEDY).passed
    with fault("acceptance"):
        assert not decoder.verify(prompts, GREEDY).passed
    monkeypatch.setattr(reference, "PASSES_CHOOSING", 0)
    assert not decoder.verify(prompts, GREEDY).passed, "one pass alone does not show that a router may flip"


# ---- what the reference is ----


def test_a_widened_model_computes_in_the_wider_dtype_and_is_itself_again(zoo: Zoo) -> None:
    """Keeps out: a part that stays narrow, a weight that moves (captured graphs know addresses), a failed pass that leaves wide
    weights behind."""
    narrow, wide = (decoder_of(zoo, dtype) for dtype in ("bfloat16", "float32"))
    before = {name: (weight.data_ptr(), weight.dtype) for name, weight in narrow.model.named_parameters()}
    with torch.inference_mode():
        held, exact = ((*model.parameters(), *model.buffers()) for model in (narrow.model, wide.model))
        for weight, other in zip(held, exact, strict=True):
            other.copy_(weight)  # rounded, as the narrow model's are
        ids, passes = PROMPTS[5], [passes_of(Session(decoder)) for decoder in (narrow, wide)]
        want = passes[1].logits(passes[1].hidden(ids))
        with passes[0].wide(small=100):  # so that layers of a tiny model are widened one by one
            got = passes[0].logits(passes[0].hidden(ids))
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        with pytest.raises(IndexError), passes[0].wide():
            passes[0].hidden([10**6])
    assert before == {name: (weight.data_ptr(), weight.dtype) for name, weight in narrow.model.named_parameters()}
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in narrow.model.modules())
    with widened(narrow.model, torch.float32):
        pass


def test_a_long_prompt_and_a_long_output_are_read_in_pieces(zoo: Zoo) -> None:
    """Keeps out: places of a later piece, or after a skipped part of the prompt, that are judged by another place's logits."""
    decoder, prompt = decoder_of(zoo, "bfloat16"), (PROMPTS[4] * 5)[:90]
    (out,) = decoder.generate(prompt, SamplingParams(max_tokens=30))
    wrong = [*out.token_ids[:20], (out.token_ids[20] + 1) % 40, *out.token_ids[21:]]
    whole = read_text(passes_of(Session(decoder)), GeneratedText(prompt, wrong, GREEDY), [(7, out.token_ids[7])])
    pieces = read_text(passes_of(Session(decoder)), GeneratedText(prompt, wrong, GREEDY), [(7, out.token_ids[7])], piece=7)
    assert [(each.index, each.token, each.best) for each in whole.off] == [
        (each.index, each.token, each.best) for each in pieces.off
    ]
    assert (20, wrong[20], out.token_ids[20]) == next((e.index, e.token, e.best) for e in pieces.off if not e.is_explained)
    assert pieces.asked[0].is_explained and pieces.unsure == whole.unsure


# ---- the door ----


def test_what_can_t_be_verified_is_refused(zoo: Zoo) -> None:
    """Keeps out: a verdict about nothing: no draft, one token, two sides that draw differently; an option that is dropped."""
    decoder = decoder_of(zoo, "float32")
    for sampling, message in (
        (SamplingParams(temperature=1.0), "needs a seed .* nearest setting that works: seed=0"),
        (SamplingParams(max_tokens=1), "max_tokens >= 2"),
        (SamplingParams(logprobs=2), "gives no log-probabilities, got logprobs=2; nearest setting that works: logprobs=None"),
    ):
        with pytest.raises(ValueError, match=message):
            decoder.verify(PROMPTS, sampling)
    with pytest.raises(ValueError, match="has no draft head"):
        zoo.decoder("llama").verify(PROMPTS)
    (first,) = decoder.generate(PROMPTS[0], GREEDY)
    found = decoder.verify(PROMPTS[0], replace(GREEDY, stop_token_ids=first.token_ids[:1]))
    assert not found.passed and found.count("EMPTY") == 1


def test_the_command_says_what_it_found(zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Keeps out: an exit code that says PASS of a fault, a JSON without its finding, prompts and counts that are ignored."""
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"token_ids": prompt}) for prompt in PROMPTS))
    command = ["verify", "--target", str(zoo.target("llama")), "--draft", str(zoo.head("llama", "eagle1")), "--spec", "3,8,40"]
    command += ["--prompts", str(tmp_path / "prompts.jsonl"), "--num-prompts", "3", "--max-tokens", "20", "--device", "cpu"]
    assert cli.main([*command, "--json", str(tmp_path / "a.json")]) == 0
    assert "PASS: 3 of 3 prompts EXACT" in (shown := capsys.readouterr().out) and "Compared 60 tokens" in " ".join(
        shown.split()
    )
    with fault("stale keys"):
        assert cli.main([*command, "--json", str(tmp_path / "b.json"), "--temperature", "0.8"]) == 1
    assert "FAIL" in capsys.readouterr().out
    right, wrong = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json"))
    assert (right["passed"], wrong["passed"]) == (True, False) and right["tokens"] == 60
    assert right["saw_trees"] == (right["accepted"] >= 3) == ("hardly show" not in " ".join(shown.split()))
    assert [each["seed"] for each in wrong["prompts"]] == [0, 1, 2] and {each["seed"] for each in right["prompts"]} == {None}
    assert right["target"] == str(zoo.target("llama")) and right["versions"]["torch"] == torch.__version__
    assert right["prompts_from"] == wrong["prompts_from"] and right["prompts_from"]["count"] == 3
    assert {each["verdict"] for each in wrong["prompts"]} <= set(wrong["definitions"]) and wrong["settings"]["spec"] == "3,8,40"
    part = next(each["difference"] for each in wrong["prompts"] if each["difference"])
    assert part["token_baseline"] != part["token_speculative"]
    assert cli.main([*command[:3], "--device", "cpu"]) == 2 and "--draft is missing" in capsys.readouterr().err
