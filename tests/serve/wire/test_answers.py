"""Answers in OpenAI's form, made of generations without a server: what belongs to which choice, chunk and prompt."""

import json
from typing import Any

import pytest

from specdec.config import SamplingParams
from specdec.generation import Chunk, Generation, Stats, TokenLogprob
from specdec.serve.wire.answers import DONE, AnswerHeading, ChunkWriter, usage, whole_answer
from specdec.serve.wire.fields import CHAT, COMPLETIONS
from specdec.serve.wire.prompts_said import ChoicePrompt
from specdec.serve.wire.requests import RequestPlan

PIECES = ["a", "bc", "def", "\ufffd"]


def plan(path: str = COMPLETIONS, prompts: int = 1, **more: Any) -> RequestPlan:
    return RequestPlan(path, ["x"] * prompts, "prompt", SamplingParams(), None, **more)


def generation(prompt: int, tokens: list[int], **stats: int) -> Generation:
    text = "".join(PIECES[token] for token in tokens)
    return Generation([7] * prompt, tokens, text, "length", Stats(**stats), [0] * len(tokens))


def logprobs(*tokens: int) -> list[TokenLogprob]:
    return [TokenLogprob(token, -0.5, {0: -0.25, 1: float("-inf")}) for token in tokens]


def events(*written: bytes) -> list[dict[str, Any]]:
    return [json.loads(event.removeprefix("data: ")) for event in b"".join(written).decode().split("\n\n") if event]


def writer(of: RequestPlan) -> ChunkWriter:
    return ChunkWriter(AnswerHeading("id", "tiny"), of, [ChoicePrompt([7], "x")] * of.choices, PIECES.__getitem__)


def test_usage_counts_prompts_once_and_outputs_each() -> None:
    """Keeps out: tokens of a prompt, or those that the prefix cache held of it, counted once for each of its choices."""
    choices = [generation(5, [0, 1], drafted=9, accepted=4, cached_tokens=3), generation(5, [0], drafted=6, cached_tokens=4)]
    choices += [generation(8, [2, 2, 2], drafted=1, accepted=1, cached_tokens=6), generation(8, [1], cached_tokens=8)]
    assert usage(plan(prompts=2, n=2), choices) == {
        "prompt_tokens": 13,
        "completion_tokens": 7,
        "total_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 9},
        "completion_tokens_details": {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 11},
    }


def test_offsets_of_a_stream_go_on_in_each_choice() -> None:
    """Keeps out: offsets that begin anew in a chunk, or that count the text of another choice."""
    stream = writer(plan(n=2))
    chunks = [(0, [0, 1]), (1, [2]), (0, [2]), (1, [1, 0])]
    found = events(*(stream.chunk(index, Chunk("", tokens, [0] * len(tokens), logprobs(*tokens))) for index, tokens in chunks))
    offsets = [(each["choices"][0]["index"], each["choices"][0]["logprobs"]["text_offset"]) for each in found]
    assert offsets == [(0, [0, 1]), (1, [0]), (0, [3]), (1, [3, 5])]


def test_log_probabilities_can_be_written_as_json() -> None:
    """Keeps out: -Infinity, which is no JSON, and a chosen token that is missing among the likeliest."""
    made = Generation([7], [2], "def", "eos", Stats(), [0], logprobs(2))
    answer = json.loads(
        json.dumps(
            whole_answer(AnswerHeading("id", "tiny"), plan(), [made], [ChoicePrompt([7], "x")], PIECES.__getitem__),
            allow_nan=False,
        )
    )
    (choice,) = answer["choices"]
    assert (
        choice["logprobs"]["top_logprobs"] == [{"def": -0.5, "a": -0.25, "bc": -9999.0}] and choice["finish_reason"] == "stop"
    )


@pytest.mark.parametrize("texts", [[], ["a"], ["", "a", "", "b"]], ids=str)
@pytest.mark.parametrize("with_logprobs", [False, True])
def test_a_chat_s_first_chunk_alone_names_the_role(texts: list[str], with_logprobs: bool) -> None:
    """Keeps out: an answer without text that never says whose it is, and a role in every chunk."""
    stream = writer(plan(CHAT))
    own = logprobs(0) if with_logprobs else None
    written = [stream.chunk(0, Chunk(text, [0], [0], own)) for text in texts] + [stream.finish(0, "length")]
    deltas = [each["choices"][0]["delta"] for each in events(*written)]
    assert [delta.get("role") for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    assert "".join(delta.get("content", "") for delta in deltas) == "".join(texts) and deltas[-1] == {}


@pytest.mark.parametrize("include_usage", [False, True])
def test_usage_ends_a_stream_that_asked_for_it(include_usage: bool) -> None:
    """Keeps out: chunks without the null that OpenAI writes there, and a usage that nobody asked for."""
    stream = writer(plan(stream=True, include_usage=include_usage))
    end = stream.end([generation(2, [0])])
    chunks = events(stream.chunk(0, Chunk("a", [0], [0])), stream.finish(0, "length"))
    assert all(("usage" in each) == include_usage and each.get("usage") is None for each in chunks) and end.endswith(DONE)
    last = events(end.removesuffix(DONE))
    assert [(each["choices"], each["usage"]["total_tokens"]) for each in last] == ([([], 3)] if include_usage else [])
