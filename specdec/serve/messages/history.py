"""The system prompt and the messages of /v1/messages, made of blocks, as the messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from specdec.checks import shown
from specdec.serve.wire.errors import ApiError, wrong
from specdec.serve.wire.fields import UNSUPPORTED, only_used

ROLES = ("user", "assistant", "system")
# The blocks that a role's messages may hold, and of each kind the fields that are read.
TEXT = ("type", "text", "cache_control")
BLOCKS: dict[str, dict[str, tuple[str, ...]]] = {
    "system": {"text": TEXT},
    "user": {"text": TEXT, "tool_result": ("type", "tool_use_id", "content", "is_error", "cache_control")},
    "assistant": {
        "text": TEXT,
        "tool_use": ("type", "id", "name", "input", "cache_control"),
        "thinking": ("type", "thinking", "signature"),
    },
}
NEUTRAL: dict[str, dict[str, tuple[Any, ...]]] = {  # what answers hold too, sent back as history
    "text": {"citations": ([],)}, "tool_use": {"caller": ({"type": "direct"},), "toolset_name": ()},
    "tool_result": {"toolset_name": ()},
}  # fmt: skip


def read_messages(value: Any, system: Any) -> list[dict[str, Any]]:
    """The messages of the chat.  system: comes first, if it says anything.  ApiError 400 for what is wrong.

    Turns of one role that follow each other are one, with an empty line between them, as in Anthropic's API.
    """
    messages: list[dict[str, Any]] = []
    if system is not None and (text := _text(system, "system", "system")):
        _add(messages, {"role": "system", "content": text})
    if not isinstance(value, list) or not value:
        got = "an empty list" if value == [] else shown(value)
        raise wrong("messages", f"messages must be a list of messages, got {got}")
    for index, message in enumerate(value):
        name = f"messages[{index}]"
        if not isinstance(message, dict):
            raise wrong(name, f"{name} must be a message, an object, got {shown(message)}")
        told = only_used(message, ("role", "content"), {}, f"{name}.")
        if (role := told.get("role")) not in ROLES:
            raise wrong(f"{name}.role", f"{name}.role must be one of {', '.join(ROLES)}, got {shown(role)}")
        for each in (_assistant if role == "assistant" else _others)(role, told.get("content"), f"{name}.content"):
            _add(messages, each)
    if messages[-1]["role"] == "assistant" and not (messages[-1]["content"] and "tool_calls" not in messages[-1]):
        fault = f"messages[{len(value) - 1}] is the assistant's, and has no text with which the answer could go on"
        raise wrong("messages", f"{fault}; nearest thing that works: a message of the user after it")
    return messages


def _add(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    last = messages[-1] if messages else {}
    if last.keys() == message.keys() == {"role", "content"} and last["role"] == message["role"]:
        last["content"] += "\n\n" + message["content"]
    else:
        messages.append(message)


def _others(role: str, content: Any, name: str) -> list[dict[str, Any]]:
    """The messages of a turn of the user or of the system: results of tools are messages of their own."""
    messages: list[dict[str, Any]] = []
    texts: list[str] = []
    for block, where in _blocks(content, role, name):
        if block["type"] == "text":
            texts.append(block["text"])
            continue
        if texts:
            messages.append({"role": role, "content": "".join(texts)})
            texts = []
        if not isinstance(block.get("tool_use_id"), str):
            raise wrong(f"{where}.tool_use_id", f"{where}.tool_use_id must be a text, got {shown(block.get('tool_use_id'))}")
        said = _text(block["content"], "system", f"{where}.content") if "content" in block else ""
        messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": said})
    if texts or not messages:
        messages.append({"role": role, "content": "".join(texts)})
    return messages


def _assistant(role: str, content: Any, name: str) -> list[dict[str, Any]]:
    """The one message of an answer."""
    texts, thoughts, calls = list[str](), list[str](), list[dict[str, Any]]()
    for block, where in _blocks(content, role, name):
        if block["type"] == "text":
            texts.append(block["text"])
        elif block["type"] == "thinking":
            thoughts.append(_required(block, "thinking", str, where))
        else:
            called = {"name": _required(block, "name", str, where), "arguments": _arguments(block, where)}
            calls.append({"id": _required(block, "id", str, where), "type": "function", "function": called})
    message: dict[str, Any] = {"role": role, "content": "".join(texts) or (None if calls else "")}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _arguments(block: dict[str, Any], where: str) -> str:
    try:
        return json.dumps(_required(block, "input", dict, where), ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise wrong(f"{where}.input", f"{where}.input must hold finite numbers, got {shown(block['input'])}") from None


def _required(block: dict[str, Any], key: str, kind: type, where: str) -> Any:
    if not isinstance(value := block.get(key), kind):
        expected = "an object" if kind is dict else "a text"
        raise wrong(f"{where}.{key}", f"{where}.{key} must be {expected}, got {shown(value)}")
    return value


def _text(content: Any, role: str, name: str) -> str:
    """The text of a content that has texts alone."""
    return "".join(block["text"] for block, _ in _blocks(content, role, name))


def _blocks(content: Any, role: str, name: str) -> list[tuple[dict[str, Any], str]]:
    """The blocks of a content, each with what errors call it."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, name)]
    if not isinstance(content, list):
        raise wrong(name, f"{name} must be a text or a list of blocks, got {shown(content)}")
    return [(_block(each, role, f"{name}[{index}]"), f"{name}[{index}]") for index, each in enumerate(content)]


def _block(block: Any, role: str, name: str) -> dict[str, Any]:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(block, dict) or not isinstance(kind, str):
        raise wrong(name, f'{name} must be a block such as {{"type": "text", "text": ...}}, got {shown(block)}')
    if kind not in BLOCKS[role]:
        raise _unknown(kind, BLOCKS[role], name)
    told = only_used(block, BLOCKS[role][kind], NEUTRAL.get(kind, {}), f"{name}.")
    if kind == "text":
        _required(told, "text", str, name)
    return told


def _unknown(kind: str, known: Sequence[str] | dict[str, Any], name: str) -> ApiError:
    fault = f"{name} is a block of type {kind[:40]!r}; expected one of {', '.join(known)}"
    if kind in ("image", "document"):
        why = "of a model that reads images, only its text model runs here; nearest thing that works: its text, as a text block"
    elif kind == "redacted_thinking":
        why = "nobody here can read it; nearest thing that works: leave it out"
    else:
        why = "nearest thing that works: what it says, as a text block"
    return wrong(name, f"{fault}: {why}", UNSUPPORTED)
