"""The soak's clients: they send calls with the real `openai` package and say how each of them ended.

A process of its own runs them, so this file imports neither torch nor specdec.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Literal

from toolkit.soak.answers import Leave, StreamFailed, answer_of
from toolkit.soak.calls import Call

TIMEOUT = 180.0  # seconds within which every call must end
REST = 0.3  # seconds; the server asks for longer

# answered: whole.  refused: status 4xx.  busy: status 429.  failed: status 5xx, or an error in the stream.  left: the client
# left.  hung: no end within TIMEOUT.  broken: anything else, such as a connection that was cut or an answer without sense.
End = Literal["answered", "refused", "busy", "failed", "left", "hung", "broken"]


@dataclass(slots=True)
class Outcome:
    """How a call ended.  digest: of what all choices say, which is much.  said: what an error said."""

    number: int
    end: End
    digest: str = ""
    said: str = ""


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
            found = await answer_of(client, call)
            return Outcome(call.number, "answered", sha256(repr(found).encode()).hexdigest()[:20])
    except Leave:
        return Outcome(call.number, "left")
    except TimeoutError:
        return Outcome(call.number, "left" if call.fate == "before" else "hung")
    except APIStatusError as error:
        return Outcome(call.number, _end_of(error), said=f"{error.status_code}: {error.message}")
    except APIError as error:  # one that came in a stream has no status; its subclasses say that the connection broke
        return Outcome(call.number, "failed" if type(error) is APIError else "broken", said=f"{type(error).__name__}: {error}")
    except StreamFailed as error:
        return Outcome(call.number, "failed", said=str(error))
    except Exception as error:  # of any kind: the soak reports it
        return Outcome(call.number, "broken", said=f"{type(error).__name__}: {error}")


def _end_of(error: Any) -> End:
    if error.status_code == 429:
        return "busy" if error.response.headers.get("retry-after", "").isdigit() else "broken"
    return "refused" if error.status_code < 500 else "failed"
