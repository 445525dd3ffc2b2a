"""What the soak's clients read in an answer of each kind, whole or streamed, and how they see that it makes no sense.

An answer is given as a list with a `Choice` for each choice, so that equal calls can be compared, however they were sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from toolkit.soak.calls import Call

# What the package's own signatures do not know, by kind of call.
EXTENSIONS = ("top_k", "speculate", "no_such_field", "structured_outputs", "chat_template_kwargs")
OF_RESPONSES = (*EXTENSIONS, "seed", "stop", "logit_bias", "max_tokens", "n")
Choice = tuple[str, str, list[list[str]]]  # content, thought, and of each call of a tool its name and its arguments


class Leave(Exception):
    """The client has had enough."""


class StreamFailed(Exception):
    """The last event of a response is an error, which the package hands on as any other."""


async def answer_of(client: Any, call: Call) -> list[Choice]:
    """The answer's choices.  Leave: the client leaves a stream.  StreamFailed and the package's own: the server could not
    answer.  ValueError: the answer makes no sense."""
    body = dict(call.body)
    if key := body.pop("key", None):
        body["extra_headers"] = {"Authorization": f"Bearer {key}"}
    others = OF_RESPONSES if call.kind == "response" else EXTENSIONS
    body["extra_body"] = {name: body.pop(name) for name in others if name in body}
    resource = {"completion": client.completions, "chat": client.chat.completions, "response": client.responses}[call.kind]
    answer = await resource.create(**body)
    if not body.get("stream"):
        return _response(answer) if call.kind == "response" else _whole(answer, call)
    try:
        parts = _as_fated(answer, call)
        return await (_streamed_response(parts) if call.kind == "response" else _streamed(parts, call))
    finally:
        with contextlib.suppress(Exception):  # a stream that has failed may not close either
            await answer.close()


async def _as_fated(stream: Any, call: Call) -> AsyncIterator[Any]:
    """The stream's parts, read as the call's fate says."""
    pieces = 0
    async for part in stream:
        yield part
        pieces += 1
        if call.fate == "midway" and pieces >= call.after:
            raise Leave
        if call.fate == "slow":
            await asyncio.sleep(call.after)


def _whole(answer: Any, call: Call) -> list[Choice]:
    found = []
    for choice in sorted(answer.choices, key=lambda choice: choice.index):
        said = choice.message if call.kind == "chat" else None
        calls = [[each.function.name, each.function.arguments] for each in (said and said.tool_calls) or ()]
        text = choice.text if said is None else said.content or ""
        found.append((text, _thought(said), calls))
        _check(choice.finish_reason, calls)
    return _some(found)


async def _streamed(parts: AsyncIterator[Any], call: Call) -> list[Choice]:
    found: dict[int, tuple[list[str], list[str], list[list[str]]]] = {}
    reasons: dict[int, str] = {}
    usage = None
    async for part in parts:
        usage = part.usage or usage
        for choice in part.choices:
            content, thought, calls = found.setdefault(choice.index, ([], [], []))
            delta = choice.delta if call.kind == "chat" else None
            content.append((choice.text if delta is None else delta.content) or "")
            thought.append(_thought(delta))
            for each in (delta and delta.tool_calls) or ():
                if each.function.name:
                    calls.append([each.function.name, ""])
                calls[each.index][1] += each.function.arguments or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    if ("stream_options" in call.body) != (usage is not None):
        raise ValueError(f"usage was {'' if 'stream_options' in call.body else 'not '}asked for, got {usage}")
    for index, (_, _, calls) in found.items():
        _check(reasons.get(index), calls)
    return _some([("".join(text), "".join(thought), calls) for _, (text, thought, calls) in sorted(found.items())])


def _response(answer: Any) -> list[Choice]:
    """One whole response, which says the same as a choice."""
    content, thought, calls = "", "", []
    for item in answer.output:
        if item.type == "message":
            content += "".join(part.text for part in item.content)
        elif item.type == "reasoning":
            thought += "".join(part.text for part in item.content)
        else:
            calls.append([item.name, item.arguments])
    _check({"completed": "tool_calls" if calls else "stop", "incomplete": "length"}.get(answer.status), calls)
    return [(content, thought, calls)]


async def _streamed_response(parts: AsyncIterator[Any]) -> list[Choice]:
    """What the last event holds, which must be what the pieces before it made."""
    last, pieces = None, {"output_text": "", "reasoning_text": "", "arguments": ""}
    async for last in parts:
        if last.type == "error":
            raise StreamFailed(last.message)
        if last.type.endswith(".delta"):
            (kind,) = (kind for kind in ("reasoning_text", "output_text", "arguments") if kind in last.type)
            pieces[kind] += last.delta
    if last is None or last.type not in ("response.completed", "response.incomplete"):
        raise ValueError(f"the stream's last event is {last and last.type}")
    ((content, thought, calls),) = found = _response(last.response)
    whole = {"output_text": content, "reasoning_text": thought, "arguments": "".join(each[1] for each in calls)}
    if pieces != whole:
        raise ValueError(f"the pieces of a stream were {pieces}, its last event has {whole}")
    return found


def _thought(said: Any) -> str:
    return getattr(said, "reasoning_content", None) or ""


def _check(reason: str | None, calls: list[list[str]]) -> None:
    """ValueError unless a choice has ended for a reason of OpenAI's, and its calls, if it was not cut off, are whole."""
    if reason not in ("stop", "length", "tool_calls") or (reason == "tool_calls" and not calls):
        raise ValueError(f"a choice with the calls {calls} ended for the reason {reason}")
    for name, arguments in calls if reason == "tool_calls" else ():
        told = json.loads(arguments)
        if name == "look" and told.get("unit") not in ("c", "f"):
            raise ValueError(f"a call of {name} has the arguments {arguments}")


def _some(found: list[Choice]) -> list[Choice]:
    """ValueError without a choice."""
    if not found:
        raise ValueError("the answer has no choice")
    return found
