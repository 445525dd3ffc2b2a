"""One process of clients: reads commands as lines of JSON, sends requests with the real `openai` package, answers with times.

    python -m serving.clients URL KEY          (from the folder benchmarks/)

It imports neither torch nor specdec, so it takes nothing from the server but answers.  Times are those of `time.monotonic`,
which all processes of a Linux machine share.  Collecting garbage waits until a command is done.

A command is {"work": fields of Work, "start": time, "lanes": [[number, ...], ...], "seconds": for which requests are sent} or
{"work": ..., "start": time, "arrivals": [[seconds after the start, number], ...], "places": int}.
The answer is a list with the fields of a `Record` for each request that was sent.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from serving.work import Work, count_tokens

TIMEOUT = 300.0  # seconds, after which a request counts as failed


@dataclass
class Record:
    """What one client saw of one request.

    arrived: when the request was due.  sent: when it was sent.  ended: when its stream had ended.
    chunks: when each piece of text came, and the tokens in it.
    tokens, accepted: the output's tokens, and the accepted draft tokens, as the server counts them.
    """

    number: int
    arrived: float
    sent: float = 0.0
    ended: float = 0.0
    chunks: list[tuple[float, int]] = field(default_factory=list)
    tokens: int = 0
    accepted: int = 0
    error: str | None = None


async def send(client: Any, fields: dict[str, Any], record: Record) -> None:
    """Runs one streamed request, and writes into the record what came of it."""
    is_chat = "messages" in fields
    pieces: list[tuple[float, int]] = []
    finish_reason = usage = None
    record.sent = time.monotonic()
    try:
        stream = await (client.chat if is_chat else client).completions.create(**fields)
        async for part in stream:
            now, before = time.monotonic(), usage.completion_tokens if usage else 0
            usage = part.usage or usage
            for choice in part.choices:
                if is_chat and said_of(choice.delta):
                    pieces.append((now, usage.completion_tokens - before if usage else 0))
                elif not is_chat and choice.text:
                    pieces.append((now, count_tokens(choice.text)))
                finish_reason = choice.finish_reason or finish_reason
        record.ended = time.monotonic()
        if finish_reason is None or usage is None:
            raise RuntimeError(f"the stream ended without {'a finish_reason' if finish_reason is None else 'its usage'}")
        record.tokens = usage.completion_tokens
        details = usage.completion_tokens_details
        record.accepted = (details and details.accepted_prediction_tokens) or 0
        record.chunks = pieces
    except Exception as error:  # of any kind: it is a failure to be counted
        record.ended, record.error = time.monotonic(), f"{type(error).__name__}: {error}"


def said_of(delta: Any) -> str:
    """What a chunk of a chat adds: content, a thought, or a part of a call."""
    calls = [each.function for each in delta.tool_calls or ()]
    said = [delta.content, getattr(delta, "reasoning_content", None)]
    return "".join(each or "" for each in (*said, *(text for call in calls for text in (call.name, call.arguments))))


async def run_lane(client: Any, records: list[Record], asked: dict[int, dict[str, Any]], start: float, end: float) -> None:
    """One client of a closed loop: each request is due when the one before it has ended; none is sent after the end."""
    await asyncio.sleep(start - time.monotonic())
    for record in records:
        if (now := time.monotonic()) >= end:
            break
        record.arrived = now
        await send(client, asked[record.number], record)


async def run_arrival(client: Any, record: Record, fields: dict[str, Any], places: asyncio.Semaphore) -> None:
    """One request of an open loop: sent when it is due, or as soon after that as one of this process's places is free."""
    await asyncio.sleep(record.arrived - time.monotonic())
    async with places:
        await send(client, fields, record)


async def obey(client: Any, command: dict[str, Any]) -> list[Record]:
    work, start = Work(**command["work"]), command["start"]
    if "lanes" in command:
        lanes = [[Record(number, start) for number in lane] for lane in command["lanes"]]
        records = [record for lane in lanes for record in lane]
        asked = {record.number: work.fields(record.number) for record in records}
        end = start + command["seconds"]
        await asyncio.gather(*(run_lane(client, lane, asked, start, end) for lane in lanes))
        return [record for record in records if record.sent]
    records = [Record(number, start + offset) for offset, number in command["arrivals"]]
    places = asyncio.Semaphore(command["places"])
    calls = [run_arrival(client, record, work.fields(record.number), places) for record in records]
    await asyncio.gather(*calls)
    return records


async def main(url: str, key: str) -> None:
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=TIMEOUT) as client:
        await client.models.list()  # the first call imports and connects
        print(json.dumps("ready"), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            gc.disable()
            records = await obey(client, json.loads(line))
            print(json.dumps([asdict(record) for record in records]), flush=True)
            gc.enable()
            gc.collect()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
