"""The soak's clients: they send calls with the real `openai` package and say how each of them ended.

A process of its own runs them, so this file imports neither torch nor specdec.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

from toolkit.soak.calls import Call

TIMEOUT = 180.0  # seconds within which every call must end
REST = 0.3  # seconds; the server asks for longer
EXTENSIONS = ("top_k", "speculate", "no_such_field", "structured_outputs")  # what the package's own signatures do not know

# answered: whole.  refused: status 4xx.  busy: status 429.  failed: status 5xx, or an error in the stream.  left: the client
# left.  hung: no end within TIMEOUT.  broken: anything else, such as a connection that was cut or an answer without sense.
End = Literal["answered", "refused", "busy", "failed", "left", "hung", "broken"]


@dataclass(slots=True)
class Outcome:
    """How a call ended.  digest: of the texts of all choices, which are many.  said: what an error said."""

    number: int
    end: End
    digest: str = ""
    said: str = ""


class Leave(Exception):
    """The client has had enough."""


def run_calls(url: str, key: str, calls: Sequence[Call], workers: int) -> list[Outcome]:
    """Runs calls, so many at a time, in an event loop of this process."""
    return asyncio.run(_run_calls(url, key, calls, workers))


async def _run_calls(url: str, key: str, calls: Sequence[Call], workers: int) -> list[Outcome]:
    from openai import AsyncOpenAI

    left = iter(calls)
    async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=TIMEOUT) as client:
        return [outcome for found in await asyncio.gather(*(_work(client, left) for _ in range(workers))) for outcome in found]


async def _work(client: Any, calls: Iterator[Call]) -> list[Outcome]:
    """Takes one call after the other, after a short rest where the server was busy."""
    outcomes = []
    for call in calls:
        outcomes.append(await run_call(client, call))
        if outcomes[-1].end == "busy":
            await asyncio.sleep(REST)
    return outcomes


async def run_call(client: Any, call: Call) -> Outcome:
    """Sends a call, and sees to it that it ends."""
    from openai import APIError, APIStatusError

    try:
        async with asyncio.timeout(call.after if call.fate == "before" else TIMEOUT):
            texts = await _texts(client, call)
            return Outcome(call.number, "answered", sha256(repr(texts).encode()).hexdigest()[:20])
    except Leave:
        return Outcome(call.number, "left")
    except TimeoutError:
        return Outcome(call.number, "left" if call.fate == "before" else "hung")
    except APIStatusError as error:
        return Outcome(call.number, _end_of(error), said=f"{error.status_code}: {error.message}")
    except APIError as error:  # one that came in a stream has no status; its subclasses say that the connection broke
        return Outcome(call.number, "failed" if type(error) is APIError else "broken", said=f"{type(error).__name__}: {error}")
    except Exception as error:  # of any kind: the soak reports it
        return Outcome(call.number, "broken", said=f"{type(error).__name__}: {error}")


def _end_of(error: Any) -> End:
    if error.status_code == 429:
        return "busy" if error.response.headers.get("retry-after", "").isdigit() else "broken"
    return "refused" if error.status_code < 500 else "failed"


async def _texts(client: Any, call: Call) -> list[str]:
    """The texts of an answer.  Leave: the client leaves a stream.  ValueError: the answer makes no sense."""
    body = dict(call.body)
    if key := body.pop("key", None):
        body["extra_headers"] = {"Authorization": f"Bearer {key}"}
    body["extra_body"] = {name: body.pop(name) for name in EXTENSIONS if name in body}
    create = (client.chat if call.is_chat else client).completions.create
    answer = await create(**body)
    if not body.get("stream"):
        choices = sorted(answer.choices, key=lambda choice: choice.index)
        _check(choice.finish_reason for choice in choices)
        return [choice.message.content if call.is_chat else choice.text for choice in choices]
    try:
        return await _read(answer, call)
    finally:
        with contextlib.suppress(Exception):  # a stream that has failed may not close either
            await answer.close()


async def _read(stream: Any, call: Call) -> list[str]:
    """The texts of a stream, read as the call's fate says."""
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    usage, pieces = None, 0
    async for part in stream:
        usage = part.usage or usage
        for choice in part.choices:
            text = (choice.delta.content if call.is_chat else choice.text) or ""
            texts[choice.index] = texts.get(choice.index, "") + text
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
        pieces += 1
        if call.fate == "midway" and pieces >= call.after:
            raise Leave
        if call.fate == "slow":
            await asyncio.sleep(call.after)
    _check(reasons.get(index) for index in texts)
    if ("stream_options" in call.body) != (usage is not None):
        raise ValueError(f"usage was {'' if 'stream_options' in call.body else 'not '}asked for, got {usage}")
    return [texts[index] for index in sorted(texts)]


def _check(reasons: Any) -> None:
    """ValueError unless every choice has ended for a reason of OpenAI's, and there is a choice."""
    listed = list(reasons)
    if not listed or any(reason not in ("stop", "length") for reason in listed):
        raise ValueError(f"choices ended for the reasons {listed}")
