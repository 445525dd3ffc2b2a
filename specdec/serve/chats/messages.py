"""The messages of a chat, and what its template is told besides: fields of a body become a ChatPrompt."""

from __future__ import annotations

import json
from typing import Any

from specdec.chat.tools import ToolRules
from specdec.checks import nearest_name, require_bool, shown
from specdec.prompts.chat import ChatPrompt
from specdec.prompts.encode import chat_fault
from specdec.serve.wire import fields
from specdec.serve.wire.errors import wrong

CALL_FIELDS, FUNCTION_FIELDS = ("id", "type", "function", "index"), ("name", "arguments")
EMPTY = ("assistant", "tool")  # roles whose messages may have no content: an answer that was cut off, a tool that says nothing
OF_ROLE = {"tool_calls": "assistant", "reasoning_content": "assistant", "tool_call_id": "tool"}  # fields of one role alone


def read_chat(values: dict[str, Any], rules: ToolRules) -> ChatPrompt:
    """The one chat of a body.  rules: which tools it has.  ApiError 400 for what is wrong."""
    messages = values.get("messages")
    if messages is None:
        raise wrong("messages", "messages is missing: expected a list of chat messages")
    if isinstance(messages, list):
        messages = [_message(item, f"messages[{index}]") for index, item in enumerate(messages)]
    if fault := chat_fault(messages, "messages"):
        raise wrong("messages", fault)
    kwargs = values.get("chat_template_kwargs", {})
    if not isinstance(kwargs, dict):
        raise wrong("chat_template_kwargs", f"chat_template_kwargs must be an object, got {shown(kwargs)}")
    goes_on = _flag(values, "continue_final_message", False)
    begins = _flag(values, "add_generation_prompt", not goes_on)
    if goes_on and begins:
        raise wrong(
            "continue_final_message",
            "continue_final_message goes on with the last message, and add_generation_prompt begins another one; nearest "
            "setting that works: add_generation_prompt=false",
        )
    if goes_on and messages[-1]["role"] != "assistant":
        raise wrong(
            "continue_final_message",
            f"continue_final_message needs a last message of the assistant, got one of {messages[-1]['role']!r}; nearest "
            "setting that works: false",
        )
    return ChatPrompt(messages, rules.for_template, kwargs, begins, goes_on)


def effort_of(values: dict[str, Any]) -> str | None:
    """The field reasoning_effort; None: it was left out."""
    effort = values.get("reasoning_effort")
    if effort is not None and not (isinstance(effort, str) and effort in fields.EFFORTS):
        listed = ", ".join(fields.EFFORTS)
        near = "xhigh" if effort == "max" else ""
        near = near or (nearest_name(effort[:100], fields.EFFORTS) if isinstance(effort, str) else "") or "medium"
        raise wrong("reasoning_effort", f"reasoning_effort must be one of {listed}, got {shown(effort)}; nearest: {near!r}")
    return effort


def text_part(part: Any, name: str) -> str:
    """The text of a part of a message's content."""
    keys = part.keys() - {"cache_control"} if isinstance(part, dict) else set()  # how long to keep what is computed: no text
    if keys == {"type", "text"} and part["type"] == "text" and isinstance(part["text"], str):
        return str(part["text"])
    expected = f"{name} must be {{'type': 'text', 'text': ...}}, the only kind of content supported"
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and any(word in kind for word in ("image", "audio", "video", "file")):
        raise wrong(
            name, f"{expected}, got one of type {kind[:40]!r}: of a model that reads images, only its text model runs here"
        )
    text = part if isinstance(part, str) else part.get("text", part.get("refusal")) if isinstance(part, dict) else None
    nearest = f"; nearest: {{'type': 'text', 'text': {shown(text)}}}" if isinstance(text, str) else ""
    raise wrong(name, f"{expected}, got {shown(part)}{nearest}")


def _flag(values: dict[str, Any], name: str, default: bool) -> bool:
    try:
        return require_bool(name, values.get(name, default), default)
    except TypeError as error:
        raise wrong(name, str(error)) from None


def _message(message: Any, name: str) -> Any:
    if not isinstance(message, dict):
        return message
    kept = fields.only_used(message, fields.MESSAGE_FIELDS, fields.NEUTRAL_MESSAGE_VALUES, f"{name}.")
    if isinstance(kept.get("content"), list):
        kept["content"] = "".join(text_part(part, f"{name}.content[{i}]") for i, part in enumerate(kept["content"]))
    if kept.get("tool_calls") == []:
        del kept["tool_calls"]
    if "reasoning" in kept:
        kept.setdefault("reasoning_content", kept.pop("reasoning"))
    for key, role in OF_ROLE.items():
        if key in kept and kept.get("role") != role:
            raise wrong(f"{name}.{key}", f"{name}.{key} is for messages of the role {role!r}; nearest: leave it out")
    for key in ("name", "reasoning_content", "tool_call_id"):
        if key in kept and not isinstance(kept[key], str):
            raise wrong(f"{name}.{key}", f"{name}.{key} must be a text, got {shown(kept[key])}")
    if "tool_calls" in kept:
        kept["tool_calls"] = _calls(kept["tool_calls"], f"{name}.tool_calls")
        kept.setdefault("content", None)
    elif kept.get("role") in EMPTY:
        kept.setdefault("content", "")
    return kept


def _calls(value: Any, name: str) -> list[dict[str, Any]]:
    """Calls of an earlier answer."""
    if not isinstance(value, list):
        raise wrong(name, f"{name} must be a list of calls, got {shown(value)}")
    return [_call(each, f"{name}[{index}]") for index, each in enumerate(value)]


def _call(value: Any, name: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    expected = '{"id": ..., "type": "function", "function": {"name": ..., "arguments": "{...}"}}'
    if not isinstance(function, dict) or value.get("type", "function") != "function":
        raise wrong(name, f"{name} must be {expected}, got {shown(value)}")
    call = fields.only_used(value, CALL_FIELDS, {}, f"{name}.")
    said = {key: held for key, held in function.items() if key != "parsed_arguments"}  # a client's own copy of the arguments
    held = fields.only_used(said, FUNCTION_FIELDS, {}, f"{name}.function.")
    for key in FUNCTION_FIELDS:
        if not isinstance(held.get(key), str):
            nearest = f"; nearest: {json.dumps(held.get(key) or {})[:100]!r}" if key == "arguments" else ""
            raise wrong(f"{name}.function.{key}", f"{name}.function.{key} must be a text, got {shown(held.get(key))}{nearest}")
    if not isinstance(call.get("id", ""), str):
        raise wrong(f"{name}.id", f"{name}.id must be a text, got {shown(call['id'])}")
    return {**({"id": call["id"]} if "id" in call else {}), "type": "function", "function": held}
