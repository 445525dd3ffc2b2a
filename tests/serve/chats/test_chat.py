"""/v1/chat/completions: the template's prompt, the fields of chats, and their defaults."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from toolkit.serving.server import Served, error_of

from specdec import SamplingParams, SpecDecoder

HELLO: list[Any] = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hé 日本"}]
PATH = "/v1/chat/completions"


def ask(served: Served, **body: Any) -> Any:
    answer = served.post(PATH, {"model": "tiny", "messages": HELLO, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.slow_cases
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8, "seed": 3, "top_p": 0.95}])
def test_an_answer_is_the_decoders(chat_served: Served, sampling: dict[str, Any]) -> None:
    """Keeps out: a template that is applied twice or not at all, and another text in a stream."""
    (expected,) = chat_served.decoder.generate(HELLO, SamplingParams(max_tokens=30, **sampling))
    client = chat_served.client()
    answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=30, **sampling)
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", expected.text)
    assert answer.object == "chat.completion" and answer.choices[0].finish_reason == "length"
    stream = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=30, stream=True, **sampling)
    chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(choice.delta.content or "" for choice in chunks) == expected.text
    assert [choice.delta.role for choice in chunks] == ["assistant", *[None] * (len(chunks) - 1)]
    assert [choice.finish_reason for choice in chunks] == [*[None] * (len(chunks) - 1), "length"]


def test_text_in_parts_is_one_text(chat_served: Served) -> None:
    """Keeps out: the content parts of newer clients refused, or joined with something between them."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "hé "}, {"type": "text", "text": "日本"}]}]
    answers = [
        ask(chat_served, messages=messages, max_tokens=8, temperature=0)["choices"][0]["message"]["content"]
        for messages in (parts, [{"role": "user", "content": "hé 日本"}])
    ]
    assert answers[0] == answers[1]


def test_an_answer_can_be_sent_back(chat_served: Served) -> None:
    """Keeps out: a conversation that ends after one turn, because the client sends back what it got with all its nulls."""
    client = chat_served.client()
    first = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=4, temperature=0).choices[0].message
    history = [*HELLO, {**first.model_dump(), "tool_calls": [], "name": None}, {"role": "user", "content": "on"}]
    plain = [*HELLO, {"role": "assistant", "content": first.content}, {"role": "user", "content": "on"}]
    answers = [
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=4, temperature=0)
        for messages in (history, plain)
    ]
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content


def test_an_answer_may_be_as_long_as_the_context(chat_served: Served) -> None:
    """Keeps out: chats cut off after 16 tokens, and a default that does not fit the context."""
    for field in ({}, {"max_tokens": None}):
        usage = ask(chat_served, ignore_eos=True, **field)["usage"]
        assert usage["total_tokens"] == 128
    assert ask(chat_served, ignore_eos=True, max_completion_tokens=3)["usage"]["completion_tokens"] == 3


def test_fields_that_change_nothing_are_taken(chat_served: Served) -> None:
    """Keeps out: a client library that sends every default and is refused."""
    neutral = {
        "logprobs": False, "top_logprobs": None, "tools": [], "tool_choice": "none", "parallel_tool_calls": True,
        "response_format": {"type": "text"}, "modalities": ["text"], "store": False, "metadata": {}, "service_tier": "auto",
        "audio": None, "prediction": None, "functions": [], "function_call": "auto", "reasoning_effort": "none",
        "verbosity": "medium", "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": None, "user": "somebody",
    }  # fmt: skip
    assert ask(chat_served, max_tokens=2, ignore_eos=True, **neutral)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"messages": None}, "messages", "messages is missing"),
        ({"messages": "hi"}, "messages", "must be a list of chat messages"),
        ({"messages": []}, "messages", "not empty"),
        ({"messages": ["hi"]}, "messages", "messages[0] must be a chat message"),
        ({"messages": [{"role": "user"}]}, "messages", "messages[0] lacks 'content'"),
        ({"messages": [{"role": "user", "content": None}]}, "messages", "messages[0] lacks 'content'"),
        ({"messages": [{"role": 3, "content": "hi"}]}, "messages", "must be a string such as 'user'"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages", "['content'] must be a string"),
        ({"messages": [{"role": "user", "content": "hi", "name": 5}]}, "messages[0].name", "must be a text"),
        ({"messages": [{"role": "user", "content": "hi", "contnt": 1}]}, "messages[0].contnt", "nearest: content"),
        (
            {"messages": [{"role": "assistant", "content": "hi", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls[0]",
            "must be {",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
            "the only kind of content supported, got one of type 'image_url': of a model that reads images",
        ),
        ({"prompt": "hi"}, "prompt", "prompt is a field of /v1/completions, not of /v1/chat/completions; nearest: messages"),
        ({"echo": False}, "echo", "echo is a field of /v1/completions"),
        ({"functions": [{"name": "a"}]}, "functions", "nearest thing that works: tools"),
        ({"response_format": {"type": "yaml"}}, "response_format", "type is one of text, json_object, json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "must be an object such as"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": "yes"}}},
            "response_format.json_schema.strict",
            "strict must be true or false, got 'yes'",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": 5, "schema": {}, "strict": None}}},
            "response_format.json_schema.name",
            "name must be a text, got 5",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
            "must be a JSON schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "strin"}}}},
            "response_format",
            "json_schema",
        ),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "structured_outputs", "one of the keys json, regex, grammar"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs", "regex must be a string"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "leave one or the other out",
        ),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "structured_outputs", "ignore_eos"),
        ({"max_tokens": 3, "max_completion_tokens": 3}, "max_tokens", "mean the same"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens must be >= 1"),
        ({"max_tokens": 1000}, "messages", "nearest setting that works: max_tokens="),
    ],
)
def test_what_a_chat_can_not_hold(chat_served: Served, body: dict[str, Any], param: str, said: str) -> None:
    """Keeps out: a field that is taken and ignored, and an error that does not name it."""
    error = error_of(chat_served.post(PATH, {"model": "tiny", "messages": HELLO, **body}), 400)
    assert error["param"] == param and said in error["message"] and error["type"] == "invalid_request_error", error


def test_a_chat_that_is_too_long(chat_served: Served) -> None:
    """Keeps out: the default of max_tokens turning a long chat into an error about max_tokens."""
    long = [{"role": "user", "content": "x" * 200}]
    error = error_of(chat_served.post(PATH, {"model": "tiny", "messages": long}), 400)
    assert error["code"] == "context_length_exceeded" and error["param"] == "messages"
    assert "nearest thing that works: a shorter prompt" in error["message"]


def test_a_model_without_a_template(served: Served) -> None:
    """Keeps out: a chat that becomes a prompt in a form that the model has never seen."""
    error = error_of(served.post(PATH, {"model": "tiny", "messages": HELLO}), 400)
    assert error["param"] == "messages" and "no chat template: neither chat_template.jinja nor" in error["message"]


def test_a_pool_that_is_smaller_than_the_context(chatty: SpecDecoder) -> None:
    """Keeps out: every chat that names no max_tokens refused, where the GPU holds fewer tokens than the model's context."""
    with patch("specdec.loading.memory.share_memory", return_value=(5,)):
        decoder = SpecDecoder(chatty.model, chatty.head, chatty.settings, chatty.tokenizer)
    with decoder, Served(decoder) as served:
        short = [{"role": "user", "content": "x"}]
        answer = ask(served, messages=short, ignore_eos=True)
        used = answer["usage"]["total_tokens"] + chatty.settings.lookahead
        assert answer["choices"][0]["finish_reason"] == "length" and used == 4 * chatty.settings.options.page_size
        one_more = {"model": "tiny", "messages": short, "max_tokens": answer["usage"]["completion_tokens"] + 1}
        assert "must fit the KV pool" in error_of(served.post(PATH, one_more), 400)["message"]
