"""/v1/completions through the real client: its texts are those of SpecDecoder.generate, however they are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from toolkit.serving.server import Served

from specdec import Generation, SamplingParams

TEXTS = ["Once upon a time", "The little dog", "Tom and Sue went"]
ENDING = "The end of the story is"  # its greedy text ends soon
IDS = [[5, 9, 200, 31], [7, 7, 7], [1000, 3]]
GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 11, "top_p": 0.9}
TOKENS = 16


def references(served: Served, asked: Sequence[tuple[Any, dict[str, Any]]]) -> list[Generation]:
    """What the decoder itself gives for each prompt with its options."""
    params = [SamplingParams(**{"max_tokens": TOKENS, **sampling}) for _, sampling in asked]
    return served.decoder.generate([prompt for prompt, _ in asked], params)


def texts_of_stream(stream: Any) -> dict[int, str]:
    """The texts of a stream's choices, joined."""
    texts: dict[int, str] = {}
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(  # any two of texts or ids, one or many, greedy or seeded meet
    ("prompt", "sampling"),
    [(TEXTS[0], GREEDY), (TEXTS, SEEDED), (IDS[0], SEEDED), (IDS, GREEDY)],
    ids=["text-greedy", "texts-seeded", "ids-seeded", "lists of ids-greedy"],
)
def test_texts_are_those_of_the_decoder(served: Served, prompt: Any, sampling: dict[str, Any]) -> None:
    """Keeps out: a server that adds a token, drops a space, mixes up choices, or samples otherwise, streamed or not."""
    many = prompt in (TEXTS, IDS)
    expected = [out.text for out in references(served, [(item, sampling) for item in (prompt if many else [prompt])])]
    ask: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, **sampling}
    answer = served.client().completions.create(**ask)
    assert [choice.text for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == list(range(len(expected)))
    assert texts_of_stream(served.client().completions.create(stream=True, **ask)) == dict(enumerate(expected))


@pytest.mark.slow_cases
@pytest.mark.parametrize("stream", [False, True])
def test_choices_of_a_prompt_have_seeds_in_a_row(served: Served, stream: bool) -> None:
    """Keeps out: n equal texts, choices in the order in which they end, and a choice 0 that nobody can repeat."""
    asked = [(prompt, {**SEEDED, "seed": 11 + j}) for prompt in TEXTS[:2] for j in range(3)]
    expected = [out.text for out in references(served, asked)]
    assert len(set(expected)) > 2, "the prompts don't tell seeds apart"
    answer = served.client().completions.create(model="tiny", prompt=TEXTS[:2], n=3, max_tokens=TOKENS, stream=stream, **SEEDED)
    texts = texts_of_stream(answer) if stream else {choice.index: choice.text for choice in answer.choices}
    assert [texts[i] for i in range(6)] == expected


def test_without_a_seed_texts_differ(served: Served) -> None:
    """Keeps out: a default seed, or a default temperature of 0, where OpenAI's is 1."""
    answer = served.client().completions.create(model="tiny", prompt=TEXTS[0], n=4, max_tokens=TOKENS)
    assert len({choice.text for choice in answer.choices}) > 1


def test_the_async_client_shares_the_batch(served: Served) -> None:
    """Keeps out: a server that serves one caller at a time, or mixes up callers."""

    async def ask() -> list[str]:
        async with served.async_client() as client:
            asked = [client.completions.create(model="tiny", prompt=text, max_tokens=TOKENS, temperature=0) for text in TEXTS]
            return [answer.choices[0].text for answer in await asyncio.gather(*asked)]

    assert asyncio.run(ask()) == [out.text for out in references(served, [(text, GREEDY) for text in TEXTS])]


def test_usage_is_what_the_decoder_counts(served: Served) -> None:
    """Keeps out: usage that counts a prompt once a choice, or drafts that were rejected as accepted."""
    expected = references(served, [(text, GREEDY) for text in TEXTS[:2]])
    answer = served.client().completions.create(model="tiny", prompt=TEXTS[:2], n=2, max_tokens=TOKENS, temperature=0)
    usage = answer.usage
    assert usage is not None and usage.completion_tokens_details is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens == sum(len(item.prompt_token_ids) for item in expected)
    assert usage.completion_tokens == 2 * sum(len(item.token_ids) for item in expected)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    details = usage.completion_tokens_details
    accepted = details.accepted_prediction_tokens
    assert accepted is not None and details.rejected_prediction_tokens is not None
    assert accepted == 2 * sum(item.stats.accepted for item in expected) > 0
    assert accepted + details.rejected_prediction_tokens == 2 * sum(item.stats.drafted for item in expected)
    assert usage.prompt_tokens_details.cached_tokens == 0


def test_without_speculation_the_text_is_the_same(served: Served) -> None:
    """Keeps out: an extension that is taken and not handed on."""
    answer = served.client().completions.create(
        model="tiny", prompt=TEXTS[0], max_tokens=TOKENS, temperature=0, extra_body={"speculate": False}
    )
    (expected,) = references(served, [(TEXTS[0], GREEDY)])
    assert answer.choices[0].text == expected.text
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens == 0
    assert answer.usage.completion_tokens_details.rejected_prediction_tokens == 0


@pytest.mark.slow_cases
@pytest.mark.parametrize("stream", [False, True])
def test_every_way_to_end(served: Served, stream: bool) -> None:
    """Keeps out: a reason that clients don't know ("eos"), a stop text that is shown, and extensions that do nothing."""
    (whole,) = references(served, [(ENDING, {"max_tokens": 300})])
    assert whole.finish_reason == "eos", "the prompt has no end within 300 tokens: choose another"
    ways: list[tuple[dict[str, Any], str]] = [
        ({"max_tokens": 300}, "stop"),
        ({"max_tokens": 300, "stop": "careful"}, "stop"),
        ({"max_tokens": 300, "stop": ["never there", "careful", "important"]}, "stop"),
        ({"max_tokens": 300, "extra_body": {"stop_token_ids": [whole.token_ids[6]]}}, "stop"),
        ({"max_tokens": len(whole.token_ids) + 3, "extra_body": {"ignore_eos": True}}, "length"),
        ({"max_tokens": 5}, "length"),
    ]
    own = [{**ask, **ask.get("extra_body", {})} for ask, _ in ways]
    for sampling in own:
        sampling.pop("extra_body", None)
    for (ask, reason), expected in zip(ways, references(served, [(ENDING, sampling) for sampling in own]), strict=True):
        answer = served.client().completions.create(model="tiny", prompt=ENDING, temperature=0, stream=stream, **ask)
        chunks = list(answer) if stream else [answer]
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text, ask
        assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == reason, ask
        assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])


def test_a_completion_has_16_tokens_unless_told_otherwise(served: Served) -> None:
    """Keeps out: another default than OpenAI's, by which a client's bill and time change."""
    for ask in ({}, {"max_tokens": None}, {"max_completion_tokens": 7}):
        body = {"model": "tiny", "prompt": TEXTS[0], "temperature": 0, **ask}
        answer = served.post("/v1/completions", body).json()
        assert answer["usage"]["completion_tokens"] == ask.get("max_completion_tokens", 16)


def test_fields_that_change_nothing_are_taken(served: Served) -> None:
    """Keeps out: a client library that sends every default and is refused."""
    neutral = {
        "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "logprobs": None, "echo": False, "best_of": 2,
        "suffix": None, "user": "somebody", "stop": None, "seed": None, "n": 2, "stream": False, "stream_options": None,
        "top_p": 1, "top_k": 0,
    }  # fmt: skip
    answer = served.post("/v1/completions", {"model": "tiny", "prompt": "Once", "max_tokens": 2, **neutral})
    assert answer.status_code == 200, answer.text
