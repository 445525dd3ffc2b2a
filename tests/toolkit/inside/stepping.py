"""Requests with every option, whose rows step back again and again: nothing that a caller sees of them may change."""

from __future__ import annotations

import random
from typing import Any

import pytest

from specdec import SamplingParams, SpecDecoder
from specdec.engine.request import Request
from toolkit.driver import Driver

PENALTIES: dict[str, Any] = dict(repetition_penalty=1.3, presence_penalty=0.6, frequency_penalty=0.5)
OPTIONS: list[dict[str, Any]] = [
    {},
    dict(temperature=0.9, seed=5, logprobs=2),
    dict(PENALTIES, bad_words=[[t, t + 1] for t in range(0, 38, 2)], min_tokens=20, stop_token_ids=[3, 7]),
    dict(temperature=0.8, seed=2, top_k=9, **PENALTIES, logprobs=1, logprobs_mode="processed"),
]


def ask(decoder: SpecDecoder, options: list[dict[str, Any]]) -> list[Request]:
    driver, chance = Driver(decoder), random.Random(1)
    requests = []
    for index, each in enumerate(options):
        prompt = [chance.randrange(4, 40) for _ in range(5 + 9 * index)]
        requests.append(driver.submit(prompt, SamplingParams(max_tokens=26, **each), streaming=index % 2 == 1))
    return requests


def seen(request: Request, streamed: list[str]) -> tuple[Any, list[float]]:
    """All that a caller sees of it, and numbers that may differ by rounding."""
    out = request.result()
    assert not streamed or "".join(streamed) == out.text
    chosen = [(one.token, list(one.top)) for one in out.logprobs or ()]
    numbers = [number for one in out.logprobs or () for number in (one.logprob, *one.top.values())]
    return (out.token_ids, out.text, out.finish_reason, out.origins, chosen, out.stats.accepted_per_round), numbers


def run(decoder: SpecDecoder, requests: list[Request]) -> list[tuple[Any, list[float]]]:
    driver, streamed = Driver(decoder), [list[str]() for _ in requests]
    while not driver.is_idle:
        driver.step()
        driver.assert_books_balance()
        for request, pieces in zip(requests, streamed, strict=True):
            if request.streaming and request.error is None:
                pieces.append(request.next_chunk().text)
    driver.assert_nothing_leaked()
    return [seen(request, pieces) for request, pieces in zip(requests, streamed, strict=True)]


def hold(decoder: SpecDecoder, options: list[dict[str, Any]], seed: int = 0, exact: bool = False) -> None:
    """All rows step back, once at least, and nobody sees it.  exact: log-probabilities are equal to the bit."""
    driver, chance = Driver(decoder), random.Random(seed)
    want = run(decoder, ask(decoder, options))
    driver.set_depth(1)
    driver.set_chunk(chance.choice([5, 11, 1000]))
    requests, before = ask(decoder, options), driver.stepped_back
    with driver.stepping_back(chance, 0.6) as counts:  # a chain whose drafts are accepted has few steps
        got = run(decoder, requests)
    times, recomputed = (now - earlier for now, earlier in zip(driver.stepped_back, before, strict=True))
    assert all(counts[request] for request in requests) and counts.total() > len(requests) + 2
    assert times == counts.total() and recomputed > 0
    for one, other, each in zip(got, want, options, strict=True):
        assert one[0] == other[0], each
        assert one[1] == (other[1] if exact else pytest.approx(other[1], abs=1e-4)), each
