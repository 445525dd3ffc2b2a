"""Texts that obey a schema, an expression or a grammar: at every node of the tree, whatever the draft and the batch.

Greedy and sampled text with speculation is that of plain decoding, and greedy text is that of transformers under the library's
own masks.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from toolkit.driver import Driver
from transformers import AutoModelForCausalLM, ByT5Tokenizer

from specdec import AsyncSpecDecoder, SamplingParams, SpecConfig, SpecDecoder
from specdec.grammar.matcher import GrammarState, LimitError, Matcher
from specdec.prompts.tokenizer import Tokenizer
from specdec.shipped import draft_folder, prompts_file, target_folder
from specdec.steps import Grammar

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "who": {"enum": ["Tom", "Lily", "the dog"]}},
    "required": ["n", "who"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": ""},  # no blanks: the pair was not trained on JSON, and likes them
}
SENTENCE = r"(The|A) [a-z]{2,6}( [a-z]{2,7}){2}\."
CHOICES = 'start: word ("," word)~2\nword: "yes" | "no" | "maybe"'
TREE = SpecConfig(4, 3, 10)
EACH: list[dict[str, Any]] = [
    dict(json_schema=SCHEMA),
    {},
    dict(json_schema=SCHEMA, temperature=0.9, seed=3, logprobs=4),
    dict(regex=SENTENCE, repetition_penalty=1.2, bad_words=["the", "was"]),
    dict(grammar=CHOICES, temperature=1.0, seed=8, top_p=0.9),
    dict(regex=SENTENCE, temperature=0.7, seed=1, stop="."),
    dict(temperature=0.8, seed=5),
]
PARAMS = [SamplingParams(max_tokens=32, **each) for each in EACH]
PROMPTS = [json.loads(line)["prompt"] for line in prompts_file().read_text().splitlines()[: len(EACH)]]


def load(draft: Any = None, spec: SpecConfig = TREE, **options: Any) -> SpecDecoder:
    merged = {"device": "cpu", "dtype": "float32", "max_batch_size": 3, "max_seq_len": 160, **options}
    return SpecDecoder.from_pretrained(target_folder(), draft or draft_folder(), spec, **merged)


@pytest.fixture(scope="module")
def decoder() -> SpecDecoder:
    return load()


@pytest.fixture(scope="module")
def plain(decoder: SpecDecoder) -> list[list[int]]:
    return [out.token_ids for out in decoder.generate(PROMPTS, PARAMS, speculate=False)]


def test_texts_obey_and_do_not_depend_on_the_draft(decoder: SpecDecoder, plain: list[list[int]]) -> None:
    """Seven requests on three rows, so that rows move.  Keeps out: a node that another path's mask reaches, a first token that
    no mask reaches, a row that takes its predecessor's grammar, and rows without one that get one."""
    outputs = decoder.generate(PROMPTS, PARAMS)
    assert [out.token_ids for out in outputs] == plain
    for out, each in zip(outputs, EACH, strict=True):
        if "json_schema" in each:
            assert out.finish_reason == "eos" and json.loads(out.text).keys() == {"n", "who"}
        elif "regex" in each:
            assert re.fullmatch(SENTENCE, out.text + ("." if "stop" in each else "")), out.text
        elif "grammar" in each:
            assert re.fullmatch("(yes|no|maybe)(,(yes|no|maybe)){2}", out.text), out.text
    assert outputs[0].stats.accepted + outputs[2].stats.accepted + outputs[3].stats.accepted > 0
    Driver(decoder).assert_nothing_leaked()


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("draft", "spec"), [(None, SpecConfig(5, 1, 6)), (None, SpecConfig("auto", 4, 16)), ("ngram", SpecConfig(3, 1))]
)
def test_other_drafts_write_the_same(plain: list[list[int]], draft: str | None, spec: SpecConfig) -> None:
    """Keeps out: rounds without a drafter, pauses and drafters without a checkpoint that choose without masks."""
    assert [out.token_ids for out in load(draft, spec).generate(PROMPTS, PARAMS)] == plain


def test_greedy_text_is_that_of_transformers_under_the_library_s_masks(decoder: SpecDecoder, plain: list[list[int]]) -> None:
    """Each mask is that of a matcher which reads the whole text anew."""
    model = AutoModelForCausalLM.from_pretrained(target_folder(), dtype=torch.float32)
    prompt = decoder.tokenizer.encode(PROMPTS[0])
    rule, ids = Grammar("json_schema", json.dumps(SCHEMA), (0,)), list(prompt)
    while ids[-1] != 0 or len(ids) == len(prompt):
        matcher, mask_1X = decoder.grammars.matcher(rule), np.zeros((1, 64), np.int32)
        matcher.take(ids[len(prompt) :])
        matcher.fill(mask_1X)
        allowed_V = torch.from_numpy(np.unpackbits(mask_1X.view(np.uint8), bitorder="little").astype(bool))
        with torch.no_grad():
            logits_V = model(torch.tensor([ids])).logits[0, -1]
        ids.append(int(logits_V.masked_fill(~allowed_V, -torch.inf).argmax()))
    assert ids[len(prompt) :] == plain[0]


def test_log_probabilities_are_those_of_the_allowed(decoder: SpecDecoder) -> None:
    """Raw ones are the target's own; processed ones are a distribution over what the grammar allows."""
    params = replace(PARAMS[0], logprobs=20)
    (raw,), (processed,) = (decoder.generate(PROMPTS[0], replace(params, logprobs_mode=mode)) for mode in ("raw", "processed"))
    assert raw.token_ids == processed.token_ids and raw.logprobs and processed.logprobs
    matcher = decoder.grammars.matcher(Grammar("json_schema", json.dumps(SCHEMA), (0,)))
    for given, kept in zip(raw.logprobs, processed.logprobs, strict=True):
        mask_1X = np.zeros((1, 64), np.int32)
        matcher.fill(mask_1X)
        matcher.take([kept.token])
        allowed = np.nonzero(np.unpackbits(mask_1X.view(np.uint8), bitorder="little"))[0].tolist()
        assert set(kept.top) <= set(allowed) and kept.logprob >= given.logprob
        if len(allowed) <= 20:
            assert sum(np.exp(list(kept.top.values()))) == pytest.approx(1, abs=1e-4)
            assert set(kept.top) == set(allowed)


def test_several_generations_verify_and_coroutines(decoder: SpecDecoder) -> None:
    """Keeps out: one place of a grammar that generations share, and a near-tie check that calls masked tokens wrong."""
    params = replace(PARAMS[2], n=3)
    got = [out.token_ids for out in decoder.generate(PROMPTS[2], params)]
    assert got == [decoder.generate(PROMPTS[2], replace(params, n=1, seed=3 + j))[0].token_ids for j in range(3)]
    assert decoder.verify(PROMPTS[:1], replace(PARAMS[2], logprobs=None)).passed
    out = asyncio.run(AsyncSpecDecoder(decoder).generate(PROMPTS[2], PARAMS[2]))
    assert out.token_ids == got[0]


def test_what_ends_early_leaves_the_others(decoder: SpecDecoder, plain: list[list[int]]) -> None:
    """A stream that is closed, a text that is cut off, options that leave no token.  Keeps out: a failure that reaches another
    request, and tokens of an ended request that its row's next text takes."""
    stream = decoder.stream(PROMPTS[0], PARAMS[0])
    next(stream)
    stream.close()
    (cut,) = decoder.generate(PROMPTS[0], replace(PARAMS[0], max_tokens=4))
    assert cut.finish_reason == "length" and cut.token_ids == plain[0][:4]
    impossible = SamplingParams(regex="yes", min_tokens=40, max_tokens=50)
    with pytest.raises(RuntimeError, match="ran: regex and min_tokens leave no token at position .*: min_tokens=") as info:
        decoder.generate([PROMPTS[1], PROMPTS[0]], [impossible, PARAMS[0]])
    nearest = int(str(info.value).rpartition("min_tokens=")[2])
    (works,) = decoder.generate(PROMPTS[1], replace(impossible, min_tokens=nearest))
    assert works.text.strip() == "yes" and len(works.token_ids) == nearest + 1
    silent = SamplingParams(regex="yes", bad_words=list("yes") + ["ye", "yes"], max_tokens=50)
    with pytest.raises(RuntimeError, match="ran: regex and bad_words leave no token at .*: fewer bad_words$"):
        decoder.generate(PROMPTS[1], silent)
    assert decoder.generate(PROMPTS[0], PARAMS[0])[0].token_ids == plain[0]
    Driver(decoder).assert_nothing_leaked()


@pytest.mark.parametrize("speculate", [False, True])
def test_a_grammar_that_the_library_gives_up_ends_in_an_error(decoder: SpecDecoder, speculate: bool) -> None:
    """Keeps out: free text, with finish_reason "length", after a limit of the library; an error that blames the weights."""
    params = SamplingParams(regex="x|a{1000000}", max_tokens=20, bad_words=["x"])
    said = r"ran: regex leaves no token at position \d+.*llguidance says: .*too many expressions"
    with pytest.raises(RuntimeError, match=said) as info:
        decoder.generate(PROMPTS[0], params, speculate=speculate)
    assert "NaN" not in str(info.value)


def test_a_target_s_tokenizer_must_be_there(decoder: SpecDecoder, tmp_path: Path) -> None:
    """Keeps out: an AttributeError of a tokenizer that is absent, or of a kind that no tokenizer.json describes."""
    absent, odd = tmp_path / "absent", tmp_path / "odd"
    absent.mkdir()
    ByT5Tokenizer().save_pretrained(odd)  # of Python code alone
    (odd / "vocab.json").write_text("{}")
    for folder, said in (
        (absent, "a grammar needs a tokenizer, but .* holds none"),
        (odd, "can be written as a tokenizer.json"),
    ):
        other = SpecDecoder(decoder.model, decoder.head, decoder.settings, Tokenizer(folder))
        with pytest.raises(ValueError, match=said):
            other.generate([5, 6], PARAMS[0])
    with pytest.raises(ValueError, match="json_schema can't be used: .*strin"):
        decoder.generate("The", SamplingParams(json_schema={"type": ["strin"]}))


def test_a_word_of_spaces_is_banned(decoder: SpecDecoder) -> None:
    """Keeps out: the false reason that the tokenizer makes no token of a space."""
    (space,) = decoder.tokenizer.encode_word(" ")
    (with_, without) = decoder.generate(
        [PROMPTS[1]] * 2, [SamplingParams(regex="a b"), SamplingParams(regex="a[ ]?b", bad_words=[" "])]
    )
    assert len(space) == 1 and with_.text == "a b" and without.text == "ab"


def test_a_limit_that_drafts_reach_ends_no_text(
    decoder: SpecDecoder, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library fails at some drafts, while trees are completed or masks are made.  Keeps out: a request that fails for that;
    drafts that are accepted without a mask; other rows that stop drafting; a row that stops in the next request too."""
    calls, go = iter(range(10**9)), Matcher.go

    def fails(matcher: Matcher, state: GrammarState) -> None:
        if state.depth and next(calls) in (15, 40):
            raise LimitError
        go(matcher, state)

    whole = [out.stats.accepted for out in decoder.generate(PROMPTS[:3], PARAMS[:3])]
    with monkeypatch.context() as patch:
        patch.setattr(Matcher, "go", fails)
        outputs = decoder.generate(PROMPTS[:3], PARAMS[:3])
    assert [out.token_ids for out in outputs] == plain[:3]
    accepted = [out.stats.accepted for out in outputs]
    assert sum(accepted) < sum(whole) and accepted[1] == whole[1]
    assert decoder.generate(PROMPTS[0], PARAMS[0])[0].stats.accepted == whole[0]


def test_rounds_that_are_only_tried_lead_no_text_on(plain: list[list[int]]) -> None:
    """All shapes, of batches with grammars and without.  Keeps out: a text that takes a trial's tokens, and a trial without
    grammars that takes from a text what its last round has emitted."""
    decoder = load(None, SpecConfig("auto", 2, 6))
    driver = Driver(decoder)
    driver.set_depth(1)
    controller = driver.controller_that_tries()
    controller.wanted = lambda rows, share, ready: [shape for shape in (None, *controller.shapes) if shape not in ready]
    assert [out.token_ids for out in decoder.generate(PROMPTS, PARAMS)] == plain
