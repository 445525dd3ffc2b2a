"""/v1/messages over a target that thinks, writes and calls a tool as a script says.  tests/clients has the real client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from toolkit.driver import Driver
from toolkit.serving.messages import events_of, message_of, without_ids
from toolkit.serving.scripted import save_scripted
from toolkit.serving.server import Served

from specdec import SpecConfig, SpecDecoder

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
SCRIPT = {
    ":": "<think>", "<think>": "h", "h": "i", "i": "</think>", "</think>": "L", "-": "L", "L": "o", "o": "<tool_call>",
    "</tool_call>": "</s>", "9": "O", "O": "k", "k": "</s>",
}  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content or '' }}{{ m.reasoning_content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments.unit }}{% endfor %};{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{{ reasoning_effort or '' }}{% if add_generation_prompt %}"
    "{% if messages[-1].role == 'tool' %}9{% elif enable_thinking is defined and not enable_thinking %}-{% else %}:{% endif %}"
    "{% endif %}{# <tool_call> </think> #}"
)
SCHEMA = {"type": "object", "properties": {"unit": {"type": "boolean"}}, "required": ["unit"]}
TOOL: dict[str, Any] = {"name": "look", "description": "Looks", "input_schema": SCHEMA}
USER = [{"role": "user", "content": "How warm?"}]
THINKS = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "temperature": 0, "messages": USER}


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    target = save_scripted(tmp_path_factory.mktemp("messages"), SCRIPT, TEMPLATE)
    with SpecDecoder.from_pretrained(
        target, "ngram", SpecConfig(4, 2, 9), device="cpu", max_batch_size=4, prefix_caching=True
    ) as decoder:
        with Served(decoder) as server:
            yield server
        Driver(decoder).assert_nothing_leaked()


def ask(served: Served, **more: Any) -> dict[str, Any]:
    answer = served.post(PATH, {**ASK, **more})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def error_of(answer: Any, status: int) -> dict[str, Any]:
    """The error of an answer, which must be in Anthropic's form."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body.keys() == {"type", "error", "request_id"} and body["type"] == "error"
    assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    assert body["error"].keys() == {"type", "message"}
    return dict(body["error"])


def test_a_turn_with_a_tool_and_the_next_one(scripted: Served) -> None:
    """Keeps out: blocks out of order, a history that renders otherwise than the same chat does, counts that differ from it."""
    first = ask(scripted, **THINKS, system="Be brief", tools=[TOOL])
    thought, text, call = first["content"]
    assert (thought["type"], thought["thinking"], text["type"], text["text"]) == ("thinking", "hi", "text", "Lo")
    assert (call["type"], call["name"], first["stop_reason"]) == ("tool_use", "look", "tool_use")
    assert {*call["input"]} == {"unit"} and first["usage"]["output_tokens_details"] == {"thinking_tokens": 2}
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "21"}], "is_error": False}
    turns = [*USER, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    more: dict[str, Any] = {"system": [{"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}}]}
    last = ask(scripted, **THINKS, **more, messages=turns, tools=[TOOL])
    assert last["content"] == [{"type": "text", "text": "Ok"}] and last["stop_reason"] == "end_turn"
    held = {"id": "a", "type": "function", "function": {"name": "look", "arguments": json.dumps(call["input"])}}
    chat = [
        {"role": "system", "content": "Be brief"}, *USER,
        {"role": "assistant", "content": "Lo", "reasoning_content": "hi", "tool_calls": [held]},
        {"role": "tool", "tool_call_id": "a", "content": "21"},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
    same = scripted.post("/tokenize", {"messages": chat, "tools": tools}).json()["count"]
    used = last["usage"]
    assert used["input_tokens"] + used["cache_read_input_tokens"] == same and used["cache_read_input_tokens"]
    counted = scripted.post(COUNT, {"model": "tiny", **more, "messages": turns, "tools": [TOOL]}).json()
    assert counted == {"input_tokens": same}


@pytest.mark.parametrize(
    "more", [{"tools": [TOOL]}, {"stop_sequences": ["k", "o"]}, {"max_tokens": 3}, {**THINKS, "max_tokens": 8}]
)
def test_events_of_a_stream_make_the_message(scripted: Served, more: dict[str, Any]) -> None:
    """Keeps out: another end than the whole's, a stop text that is not named, usage that is counted otherwise."""
    whole = ask(scripted, **more)
    again = ask(scripted, **more)  # by now its prompt is cached, as the stream's is
    events = events_of(scripted.post(PATH, {**ASK, **more, "stream": True}).text)
    assert without_ids(message_of(events)) == without_ids(again)
    assert "ping" in [event["type"] for event in events] and events[0]["message"]["usage"]["output_tokens"] == 0
    if "stop_sequences" in more:
        assert (whole["stop_reason"], whole["stop_sequence"], whole["content"][0]["text"]) == ("stop_sequence", "o", "L")


def test_thoughts_are_off_unless_they_are_asked_for(scripted: Served) -> None:
    """As in Anthropic's API.  Keeps out: a thought where callers read the first block's text, and an effort that is lost."""
    assert [block["type"] for block in ask(scripted, max_tokens=3)["content"]] == ["text"]
    for thinking in (THINKS["thinking"], {"type": "adaptive", "display": "summarized"}):
        assert ask(scripted, max_tokens=3, thinking=thinking)["content"][0]["type"] == "thinking"
    assert ask(scripted, max_tokens=3, thinking={"type": "disabled"})["content"][0]["type"] == "text"
    counts = [
        scripted.post(COUNT, {"messages": USER, **more}).json()["input_tokens"]
        for more in ({}, {"output_config": {"effort": "max"}}, {"output_config": {"effort": "low"}})
    ]
    assert [each - counts[0] for each in counts] == [0, len("xhigh"), len("low")]


def test_an_answer_goes_on_with_the_last_message(scripted: Served) -> None:
    """Keeps out: a second answer after a beginning that the caller wrote, and turns of one role that templates refuse."""
    turns = [*USER, {"role": "user", "content": "?"}, {"role": "assistant", "content": "w O"}]
    assert ask(scripted, messages=turns)["content"] == [{"type": "text", "text": "k"}]
    chat = {"messages": [{"role": "user", "content": "How warm?\n\n?"}, turns[-1]], "continue_final_message": True}
    same = scripted.post("/tokenize", chat).json()["count"]
    assert scripted.post(COUNT, {"messages": turns}).json()["input_tokens"] == same


def test_what_an_answer_must_be(scripted: Served) -> None:
    """Keeps out: a choice of tools, or a schema, that nobody holds the answer to."""
    other = {"name": "other", "input_schema": {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}}
    for choice, name in (
        ({"type": "tool", "name": "other", "disable_parallel_tool_use": True}, "other"),
        ({"type": "any"}, ""),
    ):
        content = ask(scripted, tools=[TOOL, other], tool_choice=choice)["content"]
        calls = [block for block in content if block["type"] != "thinking"]  # of which a required call may come after one
        assert calls[0]["type"] == "tool_use" and name in ("", calls[0]["name"])
        assert name == "" or (len(calls) == 1 and calls[0]["input"] == {"a": 1})
    none = ask(scripted, tools=[TOOL], tool_choice={"type": "none"}, max_tokens=2)
    assert none["content"] == [{"type": "text", "text": "Lo"}]
    form = {"type": "json_schema", "schema": {"enum": ["yes"]}}
    assert ask(scripted, output_config={"format": form})["content"][-1] == {"type": "text", "text": '"yes"'}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens is missing"),
    ({"max_tokens": 0}, "max_tokens must be"),
    ({"messages": []}, "messages must be a list of messages, got an empty list"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role must be one of user, assistant, system"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0] is a block of type 'image'"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text must be a text"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "expected one of text, tool_result"),
    ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": ""}]}]}, "leave it out"),
    ({"messages": [*USER, {"role": "assistant", "content": ""}]}, "a message of the user after it"),
    ({"system": [IMAGE]}, "system[0] is a block of type 'image'"),
    ({"stop_sequences": "x"}, "stop_sequences must be a list of texts"),
    ({"stop": ["x"]}, "nearest: stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0] is one of type 'web_search_20250305'"),
    ({"tools": [{"name": "a"}]}, "tools[0].input_schema must be the JSON schema of an object"),
    ({"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name must be 1 to 64 letters"),
    ({"tools": [{**TOOL, "input_schema": {"type": "array"}}]}, "tools[0].input_schema must be the schema of an object"),
    ({"tools": [TOOL], "tool_choice": {"type": "required"}}, "nearest setting that works: 'any'"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "lok"}}, "nearest setting that works: 'look'"),
    ({"tool_choice": {"type": "any"}}, "there are no tools"),
    ({"tool_choice": {"type": ["any"]}}, "tool_choice.type must be one of"),
    ({"tools": [TOOL], "tool_choice": {"type": "auto", "name": "look"}}, "tool_choice.name is not supported"),
    ({"thinking": {"type": {}}}, "thinking.type must be one of"),
    ({"messages": [{"role": {}, "content": "x"}]}, "messages[0].role must be one of"),
    ({"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, "messages[0].content[0] must be a block"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "", "name": "b", "input": 1}]}]}, "input must"),
    ({"output_config": {"effort": ["low"]}}, "output_config.effort must be one of"),
    ({"thinking": {"type": "on"}}, "thinking.type must be one of enabled, adaptive, disabled"),
    ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display is not supported"),
    ({"output_config": {"effort": "lots"}}, "output_config.effort must be one of"),
    ({"output_config": {"format": {"type": "json"}}}, "output_config.format must be"),
    ({"temperature": 200}, "temperature"),
    ({"logprobs_mode": "processed"}, "logprobs_mode is not supported: there is no such field"),
    ({"mcp_servers": [{}]}, "mcp_servers is not supported"),
    ({"prompt": "x"}, "prompt is not supported: there is no such field"),
    ({"messages": [{"role": "user", "content": "x" * 2000}]}, "maximum context length is"),
]  # fmt: skip


@pytest.mark.parametrize(("more", "said"), WRONG, ids=lambda each: each if isinstance(each, str) else "")
def test_what_a_message_can_not_be(scripted: Served, more: dict[str, Any], said: str) -> None:
    """Keeps out: errors that name a field of another endpoint, or a place that the caller's body does not have."""
    error = error_of(scripted.post(PATH, {**ASK, **more}), 400)
    assert error["type"] == "invalid_request_error" and said in error["message"], error
    assert ".function" not in error["message"]


def test_fields_that_say_nothing_about_the_text_are_taken(scripted: Served) -> None:
    """Keeps out: a client that can't run at all for a field of its bookkeeping."""
    more: dict[str, Any] = {
        "metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"}, "container": None,
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, "inference_geo": "eu",
        "mcp_servers": [], "speed": "standard",
    }  # fmt: skip
    tool = {**TOOL, "type": "custom", "cache_control": {"type": "ephemeral"}, "eager_input_streaming": True, "strict": True}
    assert without_ids(ask(scripted, **more, tools=[tool]))["content"] == without_ids(ask(scripted, tools=[TOOL]))["content"]
    empty: list[dict[str, Any]] = [{}, {"system": []}, {"system": ""}, {"system": [{"type": "text", "text": ""}]}]
    counts = [scripted.post(COUNT, {"model": "tiny", "messages": USER, **told}).json()["input_tokens"] for told in empty]
    assert len({*counts}) == 1, "an empty system prompt is rendered as one that says something"


def test_a_stream_tells_of_a_failure(scripted: Served) -> None:
    """Keeps out: a last event that this endpoint's clients don't know, where no token is left in the middle of a text."""
    banned = {"structured_outputs": {"regex": "aaaa"}, "logit_bias": {str(ord("a")): -100}, "bad_words": ["aa"]}
    last = events_of(scripted.post(PATH, {**ASK, "stream": True, **banned}).text)[-1]
    assert last["type"] == "error" and "leave no token" in last["error"]["message"]


def test_errors_around_the_endpoint_and_the_key(scripted: Served) -> None:
    """Keeps out: errors of the gate in another API's form, a key that Anthropic's clients can't bring, and any key at all."""
    with Served(scripted.decoder, api_key="sesame", max_body_bytes=1024, lenient=True) as server:
        for headers in ({}, {"x-api-key": "wrong"}, {"x-api-key": ""}, {"authorization": "Basic sesame"}):
            assert error_of(server.post(PATH, ASK, headers=headers), 401)["type"] == "authentication_error"
        for headers in ({"x-api-key": "sesame"}, {"authorization": "Bearer sesame", "x-api-key": "wrong"}):
            assert server.post(PATH, {**ASK, "max_tokens": 1}, headers={**headers, "anthropic-version": "x"}).status_code == 200
        key = {"x-api-key": "sesame"}
        assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers=key).status_code == 200
        assert error_of(server.post(f"{PATH}/batches", ASK, headers=key), 404)["type"] == "not_found_error"
        assert error_of(server.get(PATH, headers=key), 405)["type"] == "invalid_request_error"
        assert error_of(server.post(PATH, b"x" * 2000, headers=key), 413)["type"] == "request_too_large"
        assert error_of(server.post(PATH, {**ASK, "model": "other"}, headers=key), 404)["type"] == "not_found_error"
        for path in (PATH, COUNT):
            body = {"messages": USER, "top_kk": 3, **({"max_tokens": 1} if path == PATH else {})}
            assert server.post(path, body, headers=key).headers["x-specdec-left-out"] == "top_kk"
    assert scripted.state.counts.requests[PATH, "done"] and scripted.state.counts.requests[COUNT, "done"]
