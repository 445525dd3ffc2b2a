"""The object of a message: the blocks of its content, why it ended, and usage."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from specdec.chat.reply import Reply
from specdec.generation import Generation
from specdec.serve.wire.answers import usage
from specdec.serve.wire.errors import request_failed
from specdec.serve.wire.requests import RequestPlan

LARGEST = sys.float_info.max
# The escapes of JSON; halves of a character, which are none, in a group of their own.
ESCAPES = re.compile(r"\\u[dD][89abAB]..\\u[dD][c-fC-F]..|(\\u[dD][89a-fA-F]..)|\\.", re.DOTALL)


@dataclass(frozen=True)
class MessageHeading:
    """What is said of a message before and after its end.  count: how many tokens a text has."""

    id: str
    model: str
    count: Callable[[str], int]

    def message(self, content: Sequence[dict[str, Any]], ended: dict[str, Any], used: dict[str, Any]) -> dict[str, Any]:
        own = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        return {**own, "content": list(content), **ended, "usage": used}

    def used(self, plan: RequestPlan, generation: Generation, thought: str) -> dict[str, Any]:
        """The usage at the end."""
        counted = usage(plan, [generation])
        prompt, cached = counted["prompt_tokens"], counted["prompt_tokens_details"]["cached_tokens"]
        return {**used_by(prompt, cached, counted["completion_tokens"]),
                "output_tokens_details": {"thinking_tokens": self.count(thought) if thought else 0}}  # fmt: skip


def used_by(prompt: int, cached: int, output: int) -> dict[str, Any]:
    """Tokens.  Of those of the prompt, input_tokens are the ones that no cache held."""
    read = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
    return {"input_tokens": prompt - cached, **read, "output_tokens": output}


def ended_by(generation: Generation, calls: bool) -> dict[str, Any]:
    """Why an answer ended.  calls: whether it calls tools."""
    reason = "tool_use" if calls else "end_turn" if generation.stop_text is None else "stop_sequence"
    if generation.finish_reason == "length":
        reason = "max_tokens"
    return {"stop_reason": reason, "stop_sequence": generation.stop_text if reason == "stop_sequence" else None}


def text_block(text: str = "") -> dict[str, Any]:
    return {"type": "text", "text": text}


def thinking_block(thought: str = "") -> dict[str, Any]:
    return {"type": "thinking", "thinking": thought, "signature": ""}  # nothing here is signed


def call_block(name: str, call_id: str, arguments: str = "") -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": input_of(arguments)}


def blocks_of(reply: Reply) -> list[dict[str, Any]]:
    """The content of a whole answer, as a stream has it."""
    blocks = [] if reply.thought is None else [thinking_block(reply.thought)]
    if reply.content or not (blocks or reply.calls):
        blocks.append(text_block(reply.content))
    return blocks + [call_block(call.name, call.id, call.arguments) for call in reply.calls]


def input_of(arguments: str) -> Any:
    """The object of a call's arguments; of a text that was cut off, what is complete of it, as Anthropic's clients read it."""
    if not arguments:
        return {}
    whole = ESCAPES.sub(lambda found: r"\ufffd" if found[1] else found[0], arguments)
    try:
        return _sendable(from_json(whole, allow_partial=True))
    except ValueError as error:  # a number of thousands of digits
        raise request_failed(f"the arguments of a call can't be sent as an object: {error}"[:400]) from None


def _sendable(value: Any) -> Any:
    """The same with the largest number in the place of larger ones, such as 1e999, which JSON can hold and no reader can."""
    if isinstance(value, dict):
        return {key: _sendable(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_sendable(each) for each in value]
    if isinstance(value, int | float) and abs(value) > LARGEST:
        return LARGEST if value > 0 else -LARGEST
    return value
