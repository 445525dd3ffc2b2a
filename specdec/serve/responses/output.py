"""The object of a response: what was asked, the items of its output, and usage."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.chat.reply import Reply
from specdec.generation import Generation
from specdec.serve.responses.thoughts import pack
from specdec.serve.responses.tools import called
from specdec.serve.wire.answers import usage
from specdec.serve.wire.requests import RequestPlan

ECHOED: dict[str, Any] = {  # what a response repeats of its request, with what holds where it says nothing
    "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True, "reasoning": None,
    "temperature": 1.0, "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_p": 1.0,
    "truncation": "disabled", "user": None, "top_logprobs": 0,
}  # fmt: skip
THOUGHTS = "reasoning.encrypted_content"  # what clients include that bring thoughts back by it alone


@dataclass(frozen=True)
class ResponseHeading:
    """What every state of one response says.  body: the request's.  count: how many tokens a text has."""

    id: str
    model: str
    created: int
    body: dict[str, Any]
    count: Callable[[str], int]

    @property
    def carries_thoughts(self) -> bool:
        """Whether items of thoughts hold them a second time, in the one field that some clients bring back."""
        return THOUGHTS in (self.body.get("include") or ())

    def response(self, status: str, output: Sequence[dict[str, Any]], used: dict[str, Any] | None = None) -> dict[str, Any]:
        """The response as it is now."""
        told = {name: default if self.body.get(name) is None else self.body[name] for name, default in ECHOED.items()}
        return {
            "id": self.id, "object": "response", "created_at": self.created, "status": status, "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None, "model": self.model,
            "output": list(output), "previous_response_id": None, "store": False, "usage": used, **told,
        }  # fmt: skip

    def finished(self, plan: RequestPlan, generation: Generation, items: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The response at its end.  items: of the output."""
        thoughts = (part["text"] for item in items if item["type"] == "reasoning" for part in item["content"])
        used = response_usage(plan, generation, sum(map(self.count, thoughts)))
        return self.response(status_of(generation), items, used)


def status_of(generation: Generation) -> str:
    return "incomplete" if generation.finish_reason == "length" else "completed"


def response_usage(plan: RequestPlan, generation: Generation, thought: int) -> dict[str, Any]:
    """thought: how many tokens the thoughts have."""
    used = usage(plan, [generation])
    return {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": used["prompt_tokens_details"],
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": used["total_tokens"],
    }


def message_item(text: str = "", status: str = "completed", logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}
    return {"id": new_id("msg"), "type": "message", "role": "assistant", "status": status, "content": [part]}


def thought_item(text: str = "", status: str = "completed", carried: bool = False) -> dict[str, Any]:
    """carried: see ResponseHeading.carries_thoughts."""
    content = [{"type": "reasoning_text", "text": text}]
    more = {"encrypted_content": pack(text)} if carried else {}
    return {"id": new_id("rs"), "type": "reasoning", "summary": [], "content": content, "status": status, **more}


def call_item(which: Mapping[str, str], call_id: str, arguments: str = "", status: str = "completed") -> dict[str, Any]:
    """which: the fields that say which function is called."""
    return {"id": new_id("fc"), "type": "function_call", "call_id": call_id, **which, "arguments": arguments, "status": status}


def items_of(
    reply: Reply, status: str, logprobs: Sequence[Any], namespaces: Mapping[str, str], carried: bool = False
) -> list[dict[str, Any]]:
    """The items of a whole answer, as a stream has them.

    status: of the last one.  logprobs: of its tokens, as in a chat.  namespaces: of functions, by the chat's names.
    carried: see ResponseHeading.carries_thoughts.
    """
    items = [] if reply.thought is None else [thought_item(reply.thought, carried=carried)]
    if reply.content or not (items or reply.calls):
        items.append(message_item(reply.content, logprobs=logprobs))
    items += [call_item(called(call.name, namespaces), call.id, call.arguments) for call in reply.calls]
    items[-1]["status"] = status
    return items


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
