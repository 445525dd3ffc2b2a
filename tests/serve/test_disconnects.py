"""Callers that hang up: their rows and pages are free at once, whatever they were waiting for."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from toolkit.driver import Driver
from toolkit.serving.server import Served, wait_until

from specdec import SpecDecoder

LONG: dict[str, Any] = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 480, "ignore_eos": True, "temperature": 0}


def post(served: Served, body: dict[str, Any]) -> Any:
    """A connection that has sent a request."""
    content = json.dumps(body).encode()
    connection = served.connect()
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % len(content)
        + content
    )
    return connection


def test_a_caller_that_hangs_up_frees_its_pages(pair: SpecDecoder) -> None:
    """Keeps out: rows that generate on for nobody, streamed or not, one choice or several, running or waiting."""
    driver = Driver(pair)
    with Served(pair) as served:
        totals = served.state.decoder.totals
        cancelled, tokens = totals.requests["cancelled"], totals.output_tokens
        choices, bodies = 0, ({"stream": True}, {}, {"stream": True, "n": 3}, {"n": 3}, {"n": 6, "stream": True}, {"n": 6})
        for number, body in enumerate(bodies, 1):
            with driver.rounds_by_hand() as let_run:  # no text ends before the server has noticed
                connection = post(served, {**LONG, **body})
                wait_until(lambda: driver.running, "the request runs")
                let_run.release(3)
                connection.close()
                served.requests_logged(number)
            wait_until(lambda: driver.pages_free == driver.pages_total and served.state.queue.is_empty, "its pages are free")
            choices += body.get("n", 1)
        driver.settle()  # choices that waited held no page, and may leave after all pages are free
        totals = served.state.decoder.totals
        assert totals.requests["cancelled"] == cancelled + choices, "a choice ran to its end, or was never cancelled"
        assert totals.output_tokens - tokens < choices * 100
        assert [line["status"] for line in served.requests_logged(6)] == [499] * 6
        assert served.state.counts.responses[499] == 6
    driver.assert_nothing_leaked()


def test_a_caller_that_waits_and_hangs_up_leaves_the_queue(pair: SpecDecoder) -> None:
    """Keeps out: requests that run later although nobody waits for them any more."""
    driver = Driver(pair)
    with Served(pair) as served, driver.rounds_by_hand() as let_run:  # the engine looks at what came between two rounds
        first = post(served, {**LONG, "n": 4})
        wait_until(lambda: served.state.queue.open_choices == 4, "the first caller is there")
        wait_until(lambda: let_run.release() or len(driver.running) == 4, "all rows are taken")
        second = post(served, LONG)
        wait_until(lambda: served.state.queue.open_choices == 5, "the second caller is there")
        wait_until(lambda: let_run.release() or driver.waiting, "the second caller waits")
        second.close()
        served.requests_logged(1)
        let_run.release(3)
        wait_until(lambda: not driver.waiting, "it leaves the queue before a row is free")
        assert len(driver.running) == 4
        first.close()
        wait_until(lambda: served.state.queue.is_empty, "the first one leaves")
    driver.assert_nothing_leaked()


def test_leaving_a_stream_of_the_client_ends_it(served: Served) -> None:
    """Keeps out: a disconnect that only bare sockets can make."""
    driver = Driver(served.decoder)

    async def leave() -> None:
        async with served.async_client() as client:
            stream = await client.completions.create(
                model="tiny", prompt="Once", max_tokens=480, stream=True, extra_body={"ignore_eos": True}
            )
            async for chunk in stream:
                if chunk.choices[0].text:
                    break
            await stream.close()

    asyncio.run(leave())
    wait_until(lambda: driver.is_idle and served.state.queue.is_empty, "the request has ended")


@pytest.mark.slow_cases
@pytest.mark.parametrize("stream", [False, True])
def test_other_callers_do_not_notice(served: Served, stream: bool) -> None:
    """Keeps out: a disconnect that ends, delays or changes what shares the batch."""
    ask: dict[str, Any] = {**LONG, "max_tokens": 200}
    expected = served.post("/v1/completions", ask).json()["choices"][0]["text"]
    cancelled, left = served.state.decoder.totals.requests["cancelled"], served.state.counts.responses[499]
    driver = Driver(served.decoder)
    with driver.rounds_by_hand() as let_run:
        gone = post(served, {**LONG, "stream": stream, "n": 3})
        chunks = served.client().completions.create(
            model="tiny", prompt=ask["prompt"], max_tokens=200, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        wait_until(lambda: served.state.queue.open_choices == 4, "both callers are there")
        wait_until(lambda: let_run.release() or len(driver.running) == 4, "all choices run")
        gone.close()
        wait_until(lambda: served.state.counts.responses[499] == left + 1, "the server has noticed")
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    wait_until(lambda: served.state.queue.is_empty, "the other one is gone")
    assert served.state.decoder.totals.requests["cancelled"] == cancelled + 3
