"""Reads the events of /v1/messages, by the rules of Anthropic's page on streams, and makes Anthropic's client."""

from __future__ import annotations

import importlib
import json
from typing import Any

from pydantic_core import from_json

from toolkit.serving.server import Served

STARTS: dict[str, dict[str, Any]] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
    "tool_use": {"input": {}},
}
DELTAS = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}


def anthropic_client(served: Served, **settings: Any) -> Any:
    """A client of the package `anthropic`, which is installed where other people's programs are tested alone."""
    known = {"base_url": served.url, "api_key": "none", "max_retries": 0}
    return importlib.import_module("anthropic").Anthropic(**{**known, **settings})


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each of which must be named as its data say."""
    events = []
    for event in text.strip().split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the events make.  Their order must be that of Anthropic's API."""
    kinds = [event["type"] for event in events if event["type"] != "ping"]
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"] and kinds.count("message_start") == 1
    message: dict[str, Any] = json.loads(json.dumps(events[0]["message"]))
    assert message["content"] == [] and message["stop_reason"] is None
    is_open, written = False, ""
    for event in events:
        if event["type"] == "content_block_start":
            block = event["content_block"]
            assert not is_open and event["index"] == len(message["content"])
            assert STARTS[block["type"]].items() <= block.items(), "a block starts empty"
            message["content"].append(dict(block))
            is_open, written = True, ""
        elif event["type"] == "content_block_delta":
            assert is_open and event["index"] == len(message["content"]) - 1
            field = DELTAS[event["delta"]["type"]]
            if field == "partial_json":
                written += event["delta"][field]
                message["content"][-1]["input"] = from_json(written, allow_partial=True) if written else {}
            else:
                message["content"][-1][field] += event["delta"][field]
        elif event["type"] == "content_block_stop":
            assert is_open and event["index"] == len(message["content"]) - 1
            is_open = False
        elif event["type"] == "message_delta":
            assert not is_open
            message |= event["delta"]
            message["usage"] |= event["usage"]
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """The same without what is drawn."""
    blocks = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return {**{key: value for key, value in message.items() if key != "id"}, "content": blocks}
