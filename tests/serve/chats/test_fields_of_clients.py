"""Fields that clients send and that say nothing about the text, and the endpoints for tokens."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from toolkit.serving.server import Served

from specdec import __version__
from specdec.serve.wire.fields import CHAT, COMPLETIONS

ASK: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
HARMLESS: list[dict[str, Any]] = [
    {"metadata": {"a": "b"}, "store": True, "safety_identifier": "x", "prompt_cache_key": "k", "service_tier": "flex"},
    {"verbosity": "low", "user": "me", "top_k": -1, "skip_special_tokens": True, "priority": 0, "max_tokens": 4.0},
]

WRONG_TOKENS: list[tuple[str, dict[str, Any], str]] = [
    ("/tokenize", {"prompt": 3}, "prompt"),
    ("/tokenize", {"promt": "a"}, "promt"),
    ("/tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
    ("/detokenize", {"tokens": [2048]}, "tokens"),
    ("/detokenize", {"tokens": "a"}, "tokens"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": 0}, "tokens"),
    ("/tokenize", {"prompt": "a", "model": 5}, "model"),
    ("/tokenize", {"messages": [{"role": "user", "content": "a"}], "reasoning_effort": "much"}, "reasoning_effort"),
]


def post(served: Served, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(served.url + path, json=body, timeout=60, verify=False)


@pytest.mark.parametrize("more", HARMLESS)
def test_fields_without_a_meaning_for_the_text_are_taken(served: Served, more: dict[str, Any]) -> None:
    """Also a request without a model.  Keeps out: a client that can't run at all for a field of its bookkeeping."""
    plain = post(served, COMPLETIONS, ASK).json()["choices"]
    assert post(served, COMPLETIONS, {**ASK, **more}).json()["choices"] == plain


def test_a_server_takes_unknown_fields_only_where_it_says_so(served: Served) -> None:
    """Keeps out: a typing error that nobody hears of, and --lenient that hides what is wrong with a known field."""
    odd = {**ASK, "temprature": 1, "stream_options": {"odd": 1}, "suffix": "x"}
    assert post(served, COMPLETIONS, odd).json()["error"]["param"] in odd
    assert "temperature" in post(served, COMPLETIONS, {**ASK, "temprature": 1}).json()["error"]["message"]
    with Served(served.decoder, lenient=True) as server:
        assert post(server, COMPLETIONS, odd).json()["choices"] == post(served, COMPLETIONS, ASK).json()["choices"]
        assert post(server, COMPLETIONS, {**odd, "top_p": 7}).json()["error"]["param"] == "top_p"


@pytest.mark.parametrize("stream", [False, True])
def test_a_lenient_server_says_what_it_left_out(chat_served: Served, stream: bool) -> None:
    """Keeps out: a field that does nothing and nobody hears of it, one that says nothing and is named all the same, a name
    that breaks the header, and a caller's own words in the log."""
    message = {"role": "user", "content": "Hi", "odd": 1, "refusal": None, "annotations": []}
    body = {
        "messages": [message], "max_tokens": 2, "temperature": 0, "stream": stream, "guided_json": {}, "user": "u",
        "functions": [], "suffix": None, "my secret\r\n\x7fä": 1,
    }  # fmt: skip
    header = "x-specdec-left-out"
    with Served(chat_served.decoder, lenient=True) as server:
        answer = post(server, CHAT, {**body, **({} if stream else {"stream_options": {"include_usage": True}})})
        more = ["messages[0].odd", *([] if stream else ["stream_options"])]
        assert answer.headers[header].split(", ") == ["guided_json", r"'my secret\r\n\x7f\xe4'", *more]
        many = post(server, CHAT, {**body, **{f"odd{number}": 1 for number in range(300)}}).headers[header]
        assert many.endswith(", odd17, and 283 more")
        told = post(server, "/v1/responses", {"input": "Hi", "max_output_tokens": 2, "odd": 1, "store": False})
        assert told.headers[header] == "odd" and told.json()["status"] == "incomplete"
        assert header not in post(server, COMPLETIONS, {"prompt": "a", "max_tokens": 1, "user": "u", "best_of": 1}).headers
        lines = server.requests_logged(4)
        assert lines[0]["left_out"][:3] == ["guided_json", "(unknown)", "(unknown)"] and "left_out" not in lines[3]
        assert "secret" not in json.dumps(server.lines)


def test_the_mode_of_logprobs_says_what_it_needs(chat_served: Served) -> None:
    """Keeps out: a nearest setting that the endpoint refuses, too: a chat's logprobs are no number."""
    ask = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "logprobs_mode": "processed"}
    assert post(chat_served, CHAT, ask).json()["error"]["message"].endswith("logprobs=true")
    assert post(chat_served, CHAT, {**ask, "logprobs": True}).status_code == 200


def test_usage_in_each_event(served: Served) -> None:
    """Keeps out: guidellm's default, which waits for counts that never come; counts of another choice's tokens twice."""
    stream = served.client().completions.create(
        model="tiny", prompt=["Once upon a time", "The"], max_tokens=9, temperature=0, stream=True,
        stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
    )  # fmt: skip
    used = [event.usage for event in stream]
    assert len(used) > 3 and all(used)
    counts = [each.completion_tokens for each in used if each]
    assert counts == sorted(counts) and counts[-1] == counts[-2] == 18
    assert {each.prompt_tokens for each in used if each} == {len(served.decoder.encode("Once upon a time")) + 2}


def test_a_choice_among_texts(served: Served) -> None:
    """Keeps out: characters of an expression in a text that is meant as it stands."""
    texts = ["a.b*", "c|d", "(x)"]
    found = post(served, COMPLETIONS, {**ASK, "max_tokens": 20, "structured_outputs": {"choice": texts}}).json()
    assert found["choices"][0]["text"] in texts
    error = post(served, COMPLETIONS, {**ASK, "structured_outputs": {"choice": []}}).json()["error"]
    assert error["param"] == "structured_outputs" or "list of texts" in error["message"]


def test_tokens_and_back(served: Served, chat_served: Served) -> None:
    """Keeps out: ids without those that a request's prompt has, another rendering of a chat, ids that crash the tokenizer."""
    decoder, text = served.decoder, "Once upon a time, é"
    answer = post(served, "/tokenize", {"model": "tiny", "prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == decoder.encode(text) and answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == served.state.max_seq_len
    plain = post(served, "/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
    assert plain == answer["tokens"][1:]
    assert post(served, "/detokenize", {"tokens": plain}).json() == {"prompt": text}
    messages = [{"role": "user", "content": "hi"}]
    assert post(chat_served, "/tokenize", {"messages": messages}).json()["tokens"] == chat_served.decoder.encode(messages)
    for path, body, param in WRONG_TOKENS:
        refused = post(served, path, body)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param, (path, body, refused.text)
    told = post(served, "/tokenize", {"messages": messages}).json()["error"]["message"]  # not where the files lie
    assert "--chat-template FILE" in told and "/tokenize with a prompt" in told and str(decoder.tokenizer._folder) not in told
    assert httpx.get(served.url + "/version", verify=False).json() == {"version": __version__}


def test_parts_of_messages_may_say_how_long_to_keep_them(chat_served: Served) -> None:
    """Keeps out: a client of several providers that can't chat, because it marks what is to be cached."""
    part = {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}
    texts = [
        post(chat_served, CHAT, {"messages": [{"role": "user", "content": content}], "max_tokens": 3, "temperature": 0}).json()
        for content in ([part], "Hi")
    ]
    assert texts[0]["choices"] == texts[1]["choices"]
