"""Forty callers at once, who hang up at random, while rounds and prefills fail: everybody gets an answer or an error,
and afterwards pool, threads and file handles are as before."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections import Counter
from contextlib import ExitStack
from typing import Any

import openai
import pytest
from toolkit.driver import Driver
from toolkit.serving.server import Served, wait_until

from specdec import SamplingParams, SpecDecoder

CALLERS = 40
PLANTED = {"verify": (5, 10, 15), "prefill": (3, 6)}  # several: of one fault, all callers concerned may have hung up
PROMPTS = ["hé 日本", "abc", "no no no", "x"]


def ask_of(caller: int) -> dict[str, Any]:
    """What this caller asks for: always the same for the same number."""
    chance = random.Random(caller)
    return {
        "prompt": chance.choice(PROMPTS),
        "max_tokens": chance.randint(1, 24),
        "temperature": chance.choice([0, 0.7, 1.3]),
        "seed": caller,
        "extra_body": {"speculate": chance.random() < 0.8},
    }


async def call(client: openai.AsyncOpenAI, caller: int, expected: str) -> str:
    """One caller's fate: "whole", "left", "failed", or "wrong", which must not be."""
    ask, chance = ask_of(caller), random.Random(-caller)
    leaves = chance.random() < 0.3
    try:
        if chance.random() < 0.5:
            task = asyncio.ensure_future(client.completions.create(model="tiny", **ask))
            if leaves:
                await asyncio.sleep(chance.random() * 0.3)
                task.cancel()
            answer = await task
            return "whole" if answer.choices[0].text == expected else "wrong"
        text = ""
        async with await client.completions.create(model="tiny", stream=True, **ask) as stream:
            async for chunk in stream:
                text += chunk.choices[0].text
                if leaves and text:
                    return "left" if expected.startswith(text) else "wrong"
        return "whole" if text == expected else "wrong"
    except asyncio.CancelledError:
        return "left"
    except openai.APIError as error:
        return "failed" if "planted" in error.message else "wrong"


def expected_texts(decoder: SpecDecoder) -> list[str]:
    asked = [ask_of(caller) for caller in range(CALLERS)]
    names = ("max_tokens", "temperature", "seed")
    sampling = [SamplingParams(**{name: ask[name] for name in names}) for ask in asked]
    return [item.text for item in decoder.generate([ask["prompt"] for ask in asked], sampling)]


def handles() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow_cases
def test_a_crowd_leaves_everything_as_it_was(chatty: SpecDecoder) -> None:
    """Keeps out: an answer mixed up with another's, a caller without an answer, and leaks of pages, threads and handles."""
    texts, before = expected_texts(chatty), (threading.active_count(), handles())
    decoder = SpecDecoder(chatty.model, chatty.head, chatty.settings, chatty.tokenizer)  # an engine of its own
    driver = Driver(decoder)

    async def crowd() -> Counter[str]:
        async with served.async_client(timeout=300) as client:
            return Counter(await asyncio.gather(*(call(client, caller, texts[caller]) for caller in range(CALLERS))))

    with Served(decoder) as served:
        with ExitStack() as planted:
            for phase, calls in PLANTED.items():
                for number in calls:
                    planted.enter_context(driver.fail_in(phase, MemoryError("planted"), number))
            fates = asyncio.run(crowd())
        wait_until(lambda: served.state.queue.is_empty, "no request is left")
        lines = served.requests_logged(fates["whole"] + fates["failed"])  # who left at once may not have come in
        assert served.post("/v1/completions", {"model": "tiny", "prompt": "x"}).status_code == 200, "the server works as before"
    assert fates["wrong"] == 0 and fates["failed"] > 0 and fates["whole"] > 10 and fates["left"] > 0, fates
    assert {line["status"] for line in lines} <= {200, 499, 500} and not any("crash" in line for line in lines)
    driver.assert_nothing_leaked()
    asyncio.run(served.state.decoder.close())
    wait_until(lambda: threading.active_count() <= before[0] and handles() <= before[1], "threads and handles are as before")
