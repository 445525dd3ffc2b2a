"""The input of /v1/responses, a text or a list of items, as the messages of a chat."""

from __future__ import annotations

from typing import Any

from specdec.checks import shown
from specdec.serve.responses.thoughts import unpack
from specdec.serve.responses.tools import in_namespace
from specdec.serve.wire.errors import wrong
from specdec.serve.wire.fields import only_used

PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
ROLES = {"developer": "system"}  # chat templates know the older name
MESSAGE = ("type", "role", "content", "id", "status", "phase")
# What the openai package has parsed is its own copy of the arguments.
CALL = ("type", "id", "call_id", "name", "namespace", "arguments", "parsed_arguments", "status")
OUTPUT = ("type", "id", "call_id", "output", "status")
THOUGHT = ("type", "id", "summary", "content", "encrypted_content", "status")


def read_input(value: Any, instructions: Any) -> list[dict[str, Any]]:
    """The messages.  instructions: come first, as a system message.  ApiError 400 for what is wrong."""
    if instructions is not None and not isinstance(instructions, str):
        raise wrong("instructions", f"instructions must be a text, got {shown(instructions)}")
    history = _History()
    if instructions is not None:
        history.say("system", instructions)
    if isinstance(value, str):
        history.say("user", value)
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            history.add(item, f"input[{index}]")
    else:
        raise wrong("input", f"input must be a text or a list of items, got {'an empty list' if value == [] else shown(value)}")
    return history.messages


class _History:
    """Messages as items come.  A thought and calls belong to one message of the assistant, as chat templates have them."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._thought: str | None = None  # of the assistant's next message

    def say(self, role: str, text: str) -> None:
        if role == "system" and self.messages and self.messages[-1]["role"] == "system":  # many templates take one alone
            self.messages[-1]["content"] += "\n\n" + text
            return
        self.messages.append({"role": role, "content": text})
        self._take_thought()

    def add(self, item: Any, name: str) -> None:
        if not isinstance(item, dict):
            raise wrong(name, f"{name} must be an item, an object, got {shown(item)}")
        kind = item.get("type", "message")
        if kind == "message":
            told = only_used(item, MESSAGE, {}, f"{name}.")
            role = told.get("role")
            if not isinstance(role, str):
                raise wrong(f"{name}.role", f"{name}.role must be a text, got {shown(role)}")
            self.say(ROLES.get(role, role), text_of(told.get("content"), f"{name}.content"))
        elif kind == "reasoning":
            told = only_used(item, THOUGHT, {}, f"{name}.")
            own = unpack(told.get("encrypted_content"))  # all that some clients bring back
            said = told.get("content") or own or told.get("summary")
            self._thought = text_of(said, f"{name}.content") if said else None
        elif kind == "function_call":
            self._call(only_used(item, CALL, {}, f"{name}."))
        elif kind == "function_call_output":
            told = only_used(item, OUTPUT, {}, f"{name}.")
            answer = {"role": "tool", "content": text_of(told.get("output"), f"{name}.output")}
            self.messages.append({**answer, "tool_call_id": told.get("call_id")})
        else:
            kinds = "message, reasoning, function_call, function_call_output"
            kept = ""
            if kind == "item_reference":  # the AI SDK sends these, unless it is told to store nothing
                kept = "; this server keeps no items, nearest thing that works: store=false, with which clients send them whole"
                kept += " (AI SDK: providerOptions: {openai: {store: false}}, or openai.chat(MODEL))"
            raise wrong(f"{name}.type", f"{name}.type must be one of {kinds}, got {shown(kind)}{kept}")

    def _call(self, told: dict[str, Any]) -> None:
        call = {"id": told.get("call_id"), "type": "function"}
        name = in_namespace(told.get("namespace"), told.get("name"))
        call["function"] = {"name": name, "arguments": told.get("arguments")}
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": None, "tool_calls": []})
            self._take_thought()
        self.messages[-1].setdefault("tool_calls", []).append(call)

    def _take_thought(self) -> None:
        if self._thought is not None and self.messages[-1]["role"] == "assistant":
            self.messages[-1]["reasoning_content"] = self._thought
            self._thought = None


def text_of(value: Any, name: str) -> str:
    """The text of a content: itself, or the texts of its parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong(name, f"{name} must be a text or a list of parts, got {shown(value)}")
    texts = []
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") not in PARTS or not isinstance(part.get("text"), str):
            expected = f'{name}[{index}] must be a part with a text, such as {{"type": "input_text", "text": ...}}'
            raise wrong(f"{name}[{index}]", f"{expected}, got {shown(part)}")
        texts.append(part["text"])
    return "".join(texts)
