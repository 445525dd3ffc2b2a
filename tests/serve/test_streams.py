"""Streams: their events, their end, characters that span tokens, failures in the middle, and readers that are slow."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from toolkit.checkpoints.tokenizers import CHARACTERS
from toolkit.driver import Driver
from toolkit.serving.server import Served, error_of, wait_until

from specdec import SamplingParams, SpecDecoder

GOOD: dict[str, Any] = {"model": "tiny", "prompt": "Once upon a time", "temperature": 0}


def events(text: str) -> list[Any]:
    """The data of a stream's events; the mark of the end stays text."""
    assert text.endswith("\n\n")
    parts = [part.removeprefix("data: ") for part in text[:-2].split("\n\n")]
    return [part if part == "[DONE]" else json.loads(part) for part in parts]


@pytest.mark.parametrize("usage", [False, True])
def test_the_events_of_a_stream(served: Served, usage: bool) -> None:
    """Keeps out: a stream without its end, usage that nobody asked for, or usage that differs from the whole answer's."""
    options = {"stream_options": {"include_usage": True}} if usage else {}
    answer = served.post("/v1/completions", {**GOOD, "stream": True, "n": 2, **options})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    if usage:
        last = chunks.pop()
        whole = served.post("/v1/completions", {**GOOD, "n": 2}).json()
        assert last["choices"] == [] and last["usage"] == whole["usage"]
        assert all(chunk["usage"] is None for chunk in chunks)
    assert all(len(chunk["choices"]) == 1 and ("usage" in chunk) is usage for chunk in chunks)
    ends = [chunk["choices"][0]["index"] for chunk in chunks if chunk["choices"][0]["finish_reason"] is not None]
    assert sorted(ends) == [0, 1]


def test_chunks_hold_whole_characters(chat_served: Served) -> None:
    """Keeps out: a character that is cut in two at the end of a chunk, or an ASCII escape that a template breaks."""
    prompt = CHARACTERS * 3 + '"\\\n\u2028'
    seeds = range(3)
    texts = []
    for seed in seeds:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 40, "temperature": 1.5, "seed": seed}
        (expected,) = chat_served.decoder.generate(prompt, SamplingParams(max_tokens=40, temperature=1.5, seed=seed))
        chunks = events(chat_served.post("/v1/completions", {**body, "stream": True}).text)[:-1]
        pieces = [chunk["choices"][0]["text"] for chunk in chunks]
        assert "".join(pieces) == expected.text
        texts += pieces
    whole = "".join(texts)
    assert any("\x7f" < character != "\ufffd" for character in whole), "no text held a character of several tokens"


@pytest.mark.parametrize("phase", ["prefill", "verify"])
def test_a_failure_in_a_stream_is_an_event(served: Served, phase: str) -> None:
    """Keeps out: a stream that ends as if its text were complete, and a server that fails with it."""
    driver = Driver(served.decoder)
    with driver.fail_in(phase, RuntimeError("planted"), call=0):
        with pytest.raises(openai.APIError, match="the request failed while it ran: planted") as error:
            for _ in served.client().completions.create(stream=True, max_tokens=40, **GOOD):
                pass
    assert (error.value.code, error.value.type) == ("request_failed", "server_error")
    with driver.fail_in(phase, RuntimeError("planted"), call=0):
        *_, last = events(served.post("/v1/completions", {**GOOD, "stream": True, "max_tokens": 40}).text)
    assert last["error"]["message"].endswith("planted"), "the error is the last event, and no [DONE] follows"
    driver.assert_nothing_leaked()
    assert served.client().completions.create(max_tokens=4, **GOOD).choices[0].text


@pytest.mark.parametrize("phase", ["prefill", "verify"])
def test_a_failure_of_a_whole_answer(served: Served, phase: str) -> None:
    """Keeps out: an answer that lacks a choice, or a 500 without a reason; and the other choices running on for nobody."""
    with Driver(served.decoder).fail_in(phase, RuntimeError("planted"), call=0):
        error = error_of(served.post("/v1/completions", {**GOOD, "max_tokens": 40, "n": 3}), 500)
    assert error["message"] == "the request failed while it ran: planted"
    assert (error["type"], error["code"], error["param"]) == ("server_error", "request_failed", None)
    Driver(served.decoder).assert_nothing_leaked()


def test_a_slow_reader_holds_up_nobody(pair: SpecDecoder) -> None:
    """Keeps out: a server that waits for one connection, keeps rows and pages for it, or collects chunks without an end."""
    name = "m" * 4000  # stands in every chunk, so that few chunks fill all buffers
    body = {**GOOD, "model": name, "max_tokens": 150, "ignore_eos": True}
    content = json.dumps({**body, "stream": True}).encode()
    with Served(pair, model_name=name, send_buffer=4096) as served:
        with served.connect(receive_buffer=4096) as slow:
            slow.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
                % len(content)
                + content
            )
            wait_until(lambda: not served.state.queue.is_empty, "the stream is there")
            answer = served.post("/v1/completions", {**body, "max_tokens": 30}).json()
            assert answer["usage"]["completion_tokens"] == 30
            wait_until(lambda: Driver(pair).is_idle, "the row is free although nobody reads the stream")
            assert served.state.queue.open_choices == 0, "a choice that has ended is not in the queue"
            assert not served.state.queue.is_empty, "the stream has not been written to its end: its reader is not slow enough"
            text = b""
            while b"[DONE]" not in text:
                assert (piece := slow.recv(1 << 16)), "the stream ended early"
                text += piece
    pieces = [json.loads(line[6:]) for line in text.split(b"\n") if line.startswith(b"data: {")]
    (whole,) = pair.generate(GOOD["prompt"], SamplingParams(max_tokens=150, ignore_eos=True))
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole.text, "the slow reader's text differs"
    assert len(pieces) < whole.stats.rounds, "a slow reader gets fewer, longer chunks"


def test_streams_run_side_by_side(served: Served) -> None:
    """Keeps out: streams that take turns."""

    order: list[int] = []

    async def read_all() -> None:
        async def read(index: int) -> None:
            async for _ in await client.completions.create(stream=True, max_tokens=60, **GOOD):
                order.append(index)

        async with served.async_client() as client:
            await asyncio.gather(*(read(index) for index in range(4)))

    driver = Driver(served.decoder)
    with ThreadPoolExecutor(1) as pool:
        with driver.rounds_by_hand() as let_run:
            reading = pool.submit(asyncio.run, read_all())
            wait_until(lambda: served.state.queue.open_choices == 4, "all callers are there")
            wait_until(lambda: len(driver.running) == 4 or let_run.release(), "all of them run")
            wait_until(lambda: len(set(order)) == 4, "each has read something")
        reading.result()
    firsts, lasts = [order.index(i) for i in range(4)], [len(order) - order[::-1].index(i) for i in range(4)]
    assert max(firsts) < min(lasts), "a stream began after another one had ended"
