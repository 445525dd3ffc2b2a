"""An object that an agent asks for beside its tools, in the bodies that the AI SDK sends (ai 6.0.326), whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from toolkit.serving.scripted import save_scripted
from toolkit.serving.server import Served

from specdec import SpecConfig, SpecDecoder

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
# A thought and a call; after a tool's answer, which ends with "9", an object.
SCRIPT = {
    ":": "<think>", "<think>": "h", "h": "</think>", "</think>": "<tool_call>", "</tool_call>": "</s>", "9": "{", "{": "}",
    "}": "</s>",
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ m.reasoning_content or '' }}{{ m.content or '' }};{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
    "{% if messages[-1].role == 'tool' or messages[-1].content == '9' %}9{% else %}:{% endif %}{# <tool_call> </think> #}"
)
SCHEMA = {
    "$schema": "http://json-schema.org/draft-07/schema#", "type": "object",
    "properties": {"unit": {"type": "string", "enum": ["c", "f"]}, "exact": {"type": "boolean"}},
    "required": ["unit", "exact"], "additionalProperties": False,
}  # fmt: skip
SETTINGS: dict[str, Any] = {"model": "tiny", "temperature": 0}


@pytest.fixture(scope="module", params=["plain", "speculating"])
def agent(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    target = save_scripted(tmp_path_factory.mktemp("agent"), SCRIPT, TEMPLATE)
    how: tuple[Any, ...] = ("ngram", SpecConfig(4, 2, 9)) if request.param == "speculating" else ()
    with SpecDecoder.from_pretrained(target, *how, device="cpu", max_batch_size=2) as decoder, Served(decoder) as server:
        yield server


def events_of(text: str) -> list[dict[str, Any]]:
    """The objects of a stream's events."""
    return [json.loads(line.partition("data: ")[2]) for line in text.split("\n") if line.startswith("data: {")]


def chatted(agent: Served, stream: bool, **body: Any) -> tuple[str, list[dict[str, Any]], str]:
    """The content, the calls, and why the answer ended."""
    answer = agent.post(CHAT, {**SETTINGS, "max_tokens": 100, "store": False, **body, "stream": stream})
    assert answer.status_code == 200, answer.text
    if not stream:
        (choice,) = answer.json()["choices"]
        return choice["message"]["content"] or "", choice["message"].get("tool_calls", []), choice["finish_reason"]
    choices = [event["choices"][0] for event in events_of(answer.text)]
    calls: list[dict[str, Any]] = []
    for piece in (call for choice in choices for call in choice["delta"].get("tool_calls", ())):
        if "id" in piece:
            calls.append({"id": piece["id"], "type": piece["type"], "function": {**piece["function"]}})
        else:
            calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return text, calls, choices[-1]["finish_reason"]


@pytest.mark.slow_cases
@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_calls_and_then_writes_the_object(agent: Served, stream: bool) -> None:
    """Keeps out: a format that stops the call before it, a tool that stops the object after it, a wrong finish_reason."""
    tool = {"type": "function", "function": {"name": "weather", "description": "w", "parameters": SCHEMA}}
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA, "strict": True, "name": "response"}}
    more: dict[str, Any] = {"response_format": form, "tools": [tool], "tool_choice": "auto"}
    asked: list[Any] = [{"role": "user", "content": "How warm?"}]
    text, (call,), reason = chatted(agent, stream, messages=asked, **more)
    assert (text, reason, call["function"]["name"]) == ("", "tool_calls", "weather")
    turns = [
        *asked,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "9"},
    ]
    text, calls, reason = chatted(agent, stream, messages=turns, **more)
    assert json.loads(text)["unit"] in ("c", "f") and (calls, reason) == ([], "stop")


@pytest.mark.slow_cases
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_calls_and_then_writes_the_object(agent: Served, stream: bool) -> None:
    """Keeps out: the same at the endpoint that the package takes by itself; a loop that forgets what the model thought before
    it called a tool, because its client brings back `encrypted_content` alone; a changed one that is an error or a text."""
    tool = {"type": "function", "name": "weather", "description": "w", "parameters": SCHEMA}
    form = {"format": {"type": "json_schema", "strict": True, "name": "response", "schema": SCHEMA}}
    body = {
        **SETTINGS, "max_output_tokens": 100, "text": form, "store": False, "include": ["reasoning.encrypted_content"],
        "tools": [tool], "tool_choice": "auto", "stream": stream,
    }  # fmt: skip
    asked: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "How warm?"}]}]

    def answered(turns: list[Any]) -> tuple[list[dict[str, Any]], int]:
        answer = agent.post(RESPONSES, {**body, "input": turns})
        assert answer.status_code == 200, answer.text
        told = events_of(answer.text)[-1]["response"] if stream else answer.json()
        return told["output"], told["usage"]["input_tokens"]

    (thought, call), _ = answered(asked)
    assert thought["content"][0]["text"] == "h"
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "9"}
    called = {key: call[key] for key in ("type", "id", "call_id", "name", "arguments")}
    kept, lengths = thought["encrypted_content"], []
    for packed in (kept, None, "gAAAAB", kept[:-1] + "!"):
        told = {"type": "reasoning", "id": thought["id"], "encrypted_content": packed, "summary": []}
        (message,), length = answered([*asked, told, called, output])
        assert json.loads(message["content"][0]["text"])["unit"] in ("c", "f") and message["status"] == "completed"
        lengths.append(length - len("h"))
    assert lengths[0] == lengths[1] + 1 == lengths[2] + 1
    plain = agent.post(RESPONSES, {**body, "include": None, "stream": False, "input": asked}).json()["output"][0]
    assert plain["content"] == thought["content"] and "encrypted_content" not in plain


@pytest.mark.parametrize("stream", [False, True])
def test_any_object(agent: Served, stream: bool) -> None:
    """Keeps out: `Output.json`, which names no schema, that comes to no end where the model has closed its object."""
    answer = chatted(agent, stream, messages=[{"role": "user", "content": "9"}], response_format={"type": "json_object"})
    assert json.loads(answer[0]) == {} and answer[1:] == ([], "stop")


def test_nothing_is_kept_and_answers_say_so(agent: Served) -> None:
    """Keeps out: programs that fail for a field which says nothing of the text; an answer that claims to be kept; a value of
    that field which means neither; an error that leaves a loop of items which it was never told to bring without a way on."""
    for store in (True, False, None):
        answer = agent.post(RESPONSES, {**SETTINGS, "input": "9", "max_output_tokens": 1, "store": store})
        assert answer.status_code == 200 and answer.json()["store"] is False, answer.text
    for store in ("yes", 1, 0, [], {"a": 1}):
        error = agent.post(RESPONSES, {**SETTINGS, "input": "9", "store": store})
        assert error.status_code == 400 and error.json()["error"]["param"] == "store"
        assert error.json()["error"]["message"].startswith("store must be true or false, got ")
    missing = agent.get(f"{RESPONSES}/{answer.json()['id']}")
    assert missing.status_code == 404 and "keeps no responses" in missing.json()["error"]["message"]
    referred = agent.post(RESPONSES, {**SETTINGS, "input": [{"type": "item_reference", "id": "fc_1"}]})
    assert referred.status_code == 400 and "{openai: {store: false}}" in referred.json()["error"]["message"]
