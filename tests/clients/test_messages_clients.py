"""Anthropic's own client against /v1/messages, and an agent that uses it."""

from __future__ import annotations

import importlib
import json
from typing import Any, Literal

import pytest
from toolkit.serving.messages import anthropic_client
from toolkit.serving.server import Served

SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["c", "f"]}, "exact": {"type": "boolean"}},
    "required": ["unit", "exact"],
}
TOOL: Any = {"name": "weather", "description": "How warm it is", "input_schema": SCHEMA}
ASK: list[Any] = [{"role": "user", "content": "How warm?"}]
GREEDY: Any = {"model": "tiny", "max_tokens": 200, "extra_body": {"temperature": 0}}


def test_a_turn_with_a_tool_and_the_next_one(caller_served: Served) -> None:
    """Keeps out: blocks that the client can't send back as they are."""
    client = anthropic_client(caller_served)
    first = client.messages.create(**GREEDY, messages=ASK, tools=[TOOL], thinking={"type": "adaptive"})
    assert [block.type for block in first.content] == ["thinking", "tool_use"] and first.stop_reason == "tool_use"
    thought, call = first.content
    assert thought.thinking == "h" and {*call.input} == {"unit", "exact"} and first._request_id
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "21"}
    turns = [*ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    last = client.messages.create(**GREEDY, messages=turns, tools=[TOOL])
    assert [(block.type, block.text) for block in last.content] == [("text", "Ok")] and last.stop_reason == "end_turn"
    counted = client.messages.count_tokens(model="tiny", messages=turns, tools=[TOOL])
    assert counted.input_tokens == last.usage.input_tokens + last.usage.cache_read_input_tokens


def test_a_stream_is_the_message(caller_served: Served) -> None:
    """Keeps out: events that the client's own helper joins to something else."""
    client = anthropic_client(caller_served)
    asked: Any = {**GREEDY, "messages": ASK, "tools": [TOOL]}
    with client.messages.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    whole = client.messages.create(**asked)
    assert {"thinking", "input_json", "signature"} <= kinds
    assert [(block.type, getattr(block, "input", None)) for block in final.content] == [
        (block.type, getattr(block, "input", None)) for block in whole.content
    ]
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    with client.messages.stream(**GREEDY, messages=[{"role": "user", "content": "9"}], stop_sequences=["k"]) as stream:
        list(stream.text_stream)
        assert stream.get_final_message().stop_sequence in (None, "k")


def test_errors_are_those_of_the_client(caller_served: Served) -> None:
    """Keeps out: an error that the client can't name, or that it sends the caller in a circle with."""
    anthropic: Any = importlib.import_module("anthropic")
    client = anthropic_client(caller_served)
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\] is one of type .*bash_20250124"):
        client.messages.create(**GREEDY, messages=ASK, tools=[{"type": "bash_20250124", "name": "bash"}])
    with pytest.raises(anthropic.NotFoundError, match="nearest setting that works: model=.*tiny") as missing:
        client.messages.create(model="claude", max_tokens=1, messages=ASK)
    assert missing.value.body["error"]["type"] == "not_found_error"
    with Served(caller_served.decoder, api_key="sesame") as locked:
        for settings in ({"api_key": "wrong"}, {"api_key": None, "auth_token": "wrong"}):
            with pytest.raises(anthropic.AuthenticationError):
                anthropic_client(locked, **settings).messages.count_tokens(model="tiny", messages=ASK)
        for settings in ({"api_key": "sesame"}, {"api_key": None, "auth_token": "sesame"}):
            assert anthropic_client(locked, **settings).messages.count_tokens(model="tiny", messages=ASK).input_tokens
    with pytest.raises(anthropic.APIError, match="leave no token"):
        banned = {"structured_outputs": {"regex": "aaaa"}, "logit_bias": {str(ord("a")): -100}, "bad_words": ["aa"]}
        list(client.messages.create(model="tiny", max_tokens=20, messages=ASK, stream=True, extra_body=banned))


def test_pydantic_ai(caller_served: Served) -> None:
    """Keeps out: an agent whose tool's answer, or whose own thought, comes back in a form that is refused."""
    importlib.import_module("pydantic_ai")
    from pydantic_ai import Agent
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.providers.anthropic import AnthropicProvider

    http = importlib.import_module("anthropic").AsyncAnthropic(base_url=caller_served.url, api_key="none")
    model = AnthropicModel("tiny", provider=AnthropicProvider(anthropic_client=http))
    asked = list[str]()
    agent = Agent(model, model_settings={"temperature": 0, "max_tokens": 200})

    @agent.tool_plain
    def weather(unit: Literal["c", "f"]) -> str:
        asked.append(unit)
        return json.dumps({"warm": 21})

    assert agent.run_sync("How warm?").output == "Ok" and asked in (["c"], ["f"])
