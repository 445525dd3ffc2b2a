"""litellm against the server, as it calls servers with OpenAI's API and with Anthropic's."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest
from toolkit.serving.server import Served

SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["c", "f"]}, "exact": {"type": "boolean"}},
    "required": ["unit", "exact"],
}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "How warm it is", "parameters": SCHEMA}}
ASK: list[Any] = [{"role": "user", "content": "How warm?"}]


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_tools_streams_and_errors(caller_served: Served, provider: str) -> None:
    """Keeps out: a field that litellm sends by itself and the server refuses, and a history that it writes in its own way."""
    litellm: Any = importlib.import_module("litellm")
    url = caller_served.url + ("/v1" if provider == "openai" else "")
    how: Any = {"model": f"{provider}/tiny", "api_base": url, "api_key": "none", "temperature": 0, "max_tokens": 200}
    first = litellm.completion(**how, messages=ASK, tools=[TOOL]).choices[0]
    assert first.finish_reason == "tool_calls" and first.message.reasoning_content == "h"
    (call,) = first.message.tool_calls
    assert call.function.name == "weather" and {*json.loads(call.function.arguments)} == {"unit", "exact"}
    chunks = list(litellm.completion(**how, messages=ASK, tools=[TOOL], stream=True))
    joined = litellm.stream_chunk_builder(chunks, messages=ASK).choices[0].message
    assert json.loads(joined.tool_calls[0].function.arguments) == json.loads(call.function.arguments)
    turns = [*ASK, first.message, {"role": "tool", "tool_call_id": call.id, "content": "21"}]
    last = litellm.completion(**how, messages=turns, tools=[TOOL]).choices[0]
    assert (last.message.content, last.finish_reason) == ("Ok", "stop")
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**how, messages=[{"role": "user", "content": "x" * 2000}])
