"""What answers say of their prompts, through the real client: echo, log-probabilities and ids are those of the decoder."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from toolkit.serving.server import Served

from specdec import SamplingParams, SpecDecoder

PROMPTS = ["Once upon a time, there was a dog", "The"]
ASK: dict[str, Any] = {"model": "tiny", "temperature": 0}


def post(served: Served, path: str, **body: Any) -> httpx.Response:
    return httpx.post(served.url + path, json={**ASK, **body}, timeout=60, verify=False)


def own_logprobs(decoder: SpecDecoder, prompt: str, tokens: int) -> list[float | None]:
    """Of the prompt's tokens and so many of the greedy text."""
    (out,) = decoder.generate(prompt, SamplingParams(max(1, tokens), prompt_logprobs=0, logprobs=0))
    assert out.prompt_logprobs is not None and out.logprobs is not None
    return [None if each is None else each.logprob for each in [*out.prompt_logprobs, *out.logprobs[:tokens]]]


@pytest.mark.parametrize("tokens", [0, 1, 6])
def test_an_echo_has_the_log_probabilities_of_all_tokens(served: Served, tokens: int) -> None:
    """Keeps out: an evaluator's sum that leaves out a token, counts the first, or reads a neighbour's; offsets that are not
    where the text of the echo has the token; a text that max_tokens=0 still adds."""
    ask: dict[str, Any] = {**ASK, "prompt": PROMPTS, "max_tokens": tokens, "echo": True, "logprobs": 2}
    answer = served.client().completions.create(**ask)
    texts = [""] * len(PROMPTS)
    found: list[dict[str, list[Any]]] = [{"tokens": [], "token_logprobs": [], "text_offset": []} for _ in PROMPTS]
    for event in served.client().completions.create(**ask, stream=True):
        for choice in event.choices:
            texts[choice.index] += choice.text
            for name, values in found[choice.index].items():
                values += getattr(choice.logprobs, name) if choice.logprobs else []
    for prompt, choice in zip(PROMPTS, answer.choices, strict=True):
        said = choice.logprobs
        assert said is not None and said.tokens is not None and said.text_offset is not None and said.top_logprobs is not None
        begin = served.decoder.tokenizer.piece(served.decoder.encode(prompt)[0])  # it is no part of the text
        assert begin + choice.text == "".join(said.tokens) and choice.text.startswith(prompt)
        assert (choice.text == prompt) == (tokens == 0)
        places = zip(said.text_offset[1:], said.tokens[1:], strict=True)
        assert [choice.text[at : at + len(token)] for at, token in places] == said.tokens[1:] and said.text_offset[0] == 0
        first, *others = own_logprobs(served.decoder, prompt, tokens)
        assert said.token_logprobs is not None and said.token_logprobs[0] is None is first
        assert said.token_logprobs[1:] == pytest.approx(others, abs=1e-5)  # in other batches sums have another order
        assert said.top_logprobs[0] is None and all(2 <= len(top) <= 3 for top in said.top_logprobs[1:])
        assert texts[choice.index] == choice.text
        streamed = found[choice.index]
        assert (streamed["tokens"], streamed["text_offset"]) == (said.tokens, said.text_offset)
        assert streamed["token_logprobs"][1:] == pytest.approx(others, abs=1e-5)
    assert answer.usage is not None and answer.usage.completion_tokens == tokens * len(PROMPTS)


def test_prompt_logprobs_and_ids_in_both_endpoints(served: Served, chat_served: Served) -> None:
    """Keeps out: ids of another prompt, a chat whose template's tokens are missing, a count that the echo has changed."""
    ids = served.decoder.encode(PROMPTS[0])
    more = {"prompt_logprobs": 1, "return_token_ids": True, "max_tokens": 3}
    choice = post(served, "/v1/completions", prompt=ids, **more, echo=True, logprobs=3).json()["choices"][0]
    assert choice["prompt_token_ids"] == ids and len(choice["token_ids"]) == 3 and choice["text"].startswith(PROMPTS[0])
    (out,) = served.decoder.generate(ids, SamplingParams(3, prompt_logprobs=1))
    assert out.prompt_logprobs is not None and choice["prompt_logprobs"][0] is None
    for known, entry in zip(out.prompt_logprobs[1:], choice["prompt_logprobs"][1:], strict=True):
        assert known is not None
        given = {int(token): each["logprob"] for token, each in entry.items()}
        assert given == pytest.approx({known.token: known.logprob, **known.top}, abs=1e-5)
        assert [each["rank"] for token, each in entry.items() if int(token) in known.top] == [1]
    messages = [{"role": "user", "content": "hi é"}]
    answer = post(chat_served, "/v1/chat/completions", messages=messages, **more).json()
    given = chat_served.decoder.encode(messages)
    assert answer["prompt_token_ids"] == given and len(answer["prompt_logprobs"]) == len(given)
    assert len(answer["choices"][0]["token_ids"]) == answer["usage"]["completion_tokens"]


def test_limits_of_log_probabilities(served: Served) -> None:
    """Keeps out: more numbers than the server's flag says, and a token less of the prompt's for max_tokens=0 without them."""
    for name in ("logprobs", "prompt_logprobs"):
        error = post(served, "/v1/completions", prompt="a", **{name: 21}).json()["error"]
        assert error["param"] == name and f"{name}=20" in error["message"]
    with Served(served.decoder, max_logprobs=100) as server:
        choice = post(server, "/v1/completions", prompt="The", logprobs=100, max_tokens=1).json()["choices"][0]
        assert 95 <= len(choice["logprobs"]["top_logprobs"][0]) <= 101
    assert post(served, "/v1/completions", prompt="a", max_tokens=0).json()["error"]["param"] == "max_tokens"


def test_stop_texts_stay_where_they_are_asked_for(served: Served) -> None:
    """Keeps out: a text cut before the stop text, or after what stands behind it in the same token."""
    whole = post(served, "/v1/completions", prompt=PROMPTS[0], max_tokens=20).json()["choices"][0]["text"]
    stop = whole[9:13]
    ask: dict[str, Any] = {"prompt": PROMPTS[0], "max_tokens": 20, "stop": stop}
    end = whole.index(stop)
    for includes in (False, True):
        choice = post(served, "/v1/completions", **ask, include_stop_str_in_output=includes).json()["choices"][0]
        assert choice["text"] == whole[: end + includes * len(stop)] and choice["finish_reason"] == "stop"


def test_a_prompt_that_is_too_long_says_so_in_words_that_clients_know(served: Served) -> None:
    """Keeps out: litellm's and LangChain's "context window exceeded" that never comes, because they read the message."""
    error = post(served, "/v1/completions", prompt=[5] * served.state.max_seq_len).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is" in error["message"] and "context_length_exceeded" in error["message"]


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_prompt_that_fills_the_context(chat_served: Served, tokens: int, logprobs: int | None) -> None:
    """Keeps out: evaluators' longest texts that are refused, because a token might follow that nobody reads."""
    decoder, path = chat_served.decoder, "/v1/completions"
    ids = [(7 * place) % 250 + 5 for place in range(chat_served.state.max_seq_len)]
    ask: dict[str, Any] = {"prompt": ids, "max_tokens": tokens, "echo": True, "logprobs": logprobs}
    if logprobs is None and tokens:  # nothing is scored, so the usual bound holds
        assert post(chat_served, path, **ask).json()["error"]["code"] == "context_length_exceeded"
        return
    answer = post(chat_served, path, **ask).json()
    (choice,), used = answer["choices"], answer["usage"]
    assert (used["prompt_tokens"], used["completion_tokens"]) == (len(ids), tokens) and choice["finish_reason"] == "length"
    streamed = [event.choices[0] for event in chat_served.client().completions.create(**ASK, **ask, stream=True)]
    assert "".join(each.text for each in streamed) == choice["text"] and streamed[-1].finish_reason == "length"
    if logprobs is None:
        assert choice["logprobs"] is None and choice["text"] == decoder.tokenizer.decode(ids)
        return
    known = [each and each.logprob for each in decoder.score(ids)[0]]
    assert choice["logprobs"]["token_logprobs"][1 : len(ids)] == pytest.approx(known[1:], abs=1e-5)
    assert len(choice["logprobs"]["tokens"]) == len(ids) + tokens
    more = {"prompt_logprobs": 1, "max_tokens": tokens}
    assert len(post(chat_served, path, prompt=ids, **more).json()["choices"][0]["prompt_logprobs"]) == len(ids)
    error = post(chat_served, path, **{**ask, "prompt": [*ids, 5]}).json()["error"]
    assert error["code"] == "context_length_exceeded" and f"max_seq_len = {len(ids)}" in error["message"]


def test_a_chat_that_fills_the_context(chat_served: Served) -> None:
    """Keeps out: a chat whose prompt alone is asked for, refused because no max_tokens was named or no token fits."""
    size = chat_served.state.max_seq_len
    given = len(chat_served.decoder.encode([{"role": "user", "content": ""}]))
    text = "é" * 2 * size
    while len(chat_served.decoder.encode([{"role": "user", "content": text}])) > size:
        text = text[:-1]
    messages = [{"role": "user", "content": text}]
    length = len(chat_served.decoder.encode(messages))
    assert given < length <= size
    for more in ({"max_tokens": 0}, {"max_tokens": 0, "stream": False, "return_token_ids": True}, {}):
        answer = post(chat_served, "/v1/chat/completions", messages=messages, prompt_logprobs=0, **more).json()
        assert len(answer["prompt_logprobs"]) == length, answer
        assert answer["usage"]["completion_tokens"] <= max(1, size - length)
