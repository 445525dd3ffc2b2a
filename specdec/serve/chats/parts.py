"""Thoughts and calls of tools in OpenAI's form: of a message, and of what a chunk adds to one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specdec.chat.reply import Reply
from specdec.chat.said import Said


def message_of(reply: Reply) -> dict[str, Any]:
    """The message of a whole answer."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.thought is not None:
        message["reasoning_content"] = reply.thought
    if reply.calls:
        message["content"] = reply.content or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.calls
        ]
    return message


def delta_of(said: Said) -> dict[str, Any]:
    """What a chunk adds to its message."""
    if said.kind == "content":
        return {"content": said.text}
    if said.kind == "thought":
        return {"reasoning_content": said.text}
    if said.kind == "call":
        call = {"id": said.id, "type": "function", "function": {"name": said.text, "arguments": ""}}
    else:
        call = {"function": {"arguments": said.text}}
    return {"tool_calls": [{"index": said.call, **call}]}


def joined(said: Sequence[Said]) -> list[Said]:
    """The same with neighbours of one kind as one piece."""
    found = list[Said]()
    for each in said:
        if found and each.kind != "call" and (found[-1].kind, found[-1].call) == (each.kind, each.call):
            found[-1] = Said(each.kind, found[-1].text + each.text, each.call)
        else:
            found.append(each)
    return found
