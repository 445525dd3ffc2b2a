"""A chat with what its template is told besides the messages.  Knows no tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from specdec.checks import nearest_name

# What apply_chat_template itself takes under these names, so that no template can be told of them by the caller.
OWN_NAMES = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template")


@dataclass(frozen=True)
class ChatPrompt:
    """A chat.  tools: what the template is told of them; None: there are none.  kwargs: variables of the template.

    begins_answer: whether the template writes the beginning of an answer after the last message.
    goes_on: whether the answer goes on with the last message, which has no end then.
    """

    messages: Sequence[Any]
    tools: Sequence[Any] | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    begins_answer: bool = True
    goes_on: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """What apply_chat_template is given besides the messages."""
        more = {} if self.tools is None else {"tools": list(self.tools)}
        own = {"add_generation_prompt": self.begins_answer, "continue_final_message": self.goes_on}
        return {**self.kwargs, **more, **own}


def check_kwargs(kwargs: Mapping[str, Any], variables: frozenset[str], name: str) -> None:
    """ValueError for a variable that the template does not read.  variables: those that it reads."""
    for key in kwargs:
        if key in OWN_NAMES:
            raise ValueError(f"{name}.{key} is not for chat_template_kwargs; nearest thing that works: the field of its own")
        if key not in variables:
            known = sorted(variables.difference(OWN_NAMES))
            near = nearest_name(str(key)[:100], known)
            hint = f"nearest: {near}" if near else f"it reads {', '.join(known[:20]) or 'none'}"
            raise ValueError(f"{name}.{str(key)[:100]} is no variable that the model's chat template reads; {hint}")


def with_objects(messages: Sequence[Any]) -> list[Any]:
    """The messages with arguments of calls as objects, which most templates write as JSON by themselves.

    Arguments that are no JSON of an object, as those of an answer that was cut off, stay texts, and so do those that a
    template could not write: numbers that JSON does not have, and halves of characters.
    """
    return [
        {**each, "tool_calls": [*map(_with_object, each["tool_calls"])]} if isinstance(each.get("tool_calls"), list) else each
        for each in messages
    ]


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    try:
        held = json.loads(function["arguments"])
        json.dumps(held, ensure_ascii=False, allow_nan=False).encode()
    except (KeyError, TypeError, ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": held}} if isinstance(held, dict) else call
