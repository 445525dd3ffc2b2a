"""Two replicas of the shipped pair on a local Ray: requests spread, a replica dies, an application is taken away.

The tests share one Ray and run in their order: the last one ends it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import openai
import pytest
from toolkit.serving.on_ray import KEY, PATIENCE, OnRay, listed_processes, wait_until
from toolkit.serving.server import error_of

from specdec import SamplingParams, SpecDecoder

pytestmark = pytest.mark.slow
PROMPTS = ["Once upon a time", "The little dog", "The sun", "One day", "A bear", "Tom", "Lily", "In the garden"]
LONG: dict[str, Any] = {"max_tokens": 150, "temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def on_ray() -> Iterator[OnRay]:
    with OnRay(num_replicas=2, num_gpus=0, max_batch_size=4) as running:
        yield running


def ask(on_ray: OnRay, prompt: str, **body: Any) -> str:
    """The text of a whole answer."""
    return on_ray.client().completions.create(model="specdec", prompt=prompt, **body).choices[0].text


def read(on_ray: OnRay, prompt: str, **body: Any) -> str:
    """The text of a stream, which must come to its end."""
    chunks = list(on_ray.client().completions.create(model="specdec", prompt=prompt, stream=True, **body))
    assert chunks[-1].choices[0].finish_reason == "length", "the stream broke off without an error"
    return "".join(chunk.choices[0].text for chunk in chunks)


def test_requests_spread_over_both_replicas(on_ray: OnRay, pair: SpecDecoder) -> None:
    """Keeps out: a replica that never gets a request, other text than the decoder's own, numbers of one replica alone."""
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, on_ray, prompt, max_tokens=24, temperature=0) for prompt in PROMPTS * 3]
        texts = [future.result() for future in asked]
    expected = [item.text for item in pair.generate(PROMPTS, SamplingParams(max_tokens=24))]
    assert texts == expected * 3
    ended = on_ray.samples("specdec_requests_total", of=2)
    assert min(ended.values()) > 0 and sum(ended.values()) == 24
    written = on_ray.samples("specdec_output_tokens_total", of=2)
    assert written.keys() == ended.keys() and sum(written.values()) == 24 * 24
    wait_until(lambda: "\nspecdec_replicas 2.0\n" in on_ray.get("/metrics").text, "they are counted")


def test_the_door_is_the_same(on_ray: OnRay) -> None:
    """Keeps out: a key that nobody asks for behind Ray, errors in another form, and an answer with two request ids."""
    body = {"model": "specdec", "prompt": "Once", "max_tokens": 1}
    ask_with = partial(httpx.post, f"{on_ray.url}/v1/completions", timeout=PATIENCE)
    key = {"authorization": f"Bearer {KEY}"}
    assert error_of(ask_with(json=body), 401)["code"] == "invalid_api_key"
    assert error_of(ask_with(json={**body, "top_p": 9}, headers=key), 400)["param"] == "top_p"
    answer = ask_with(json=body, headers=key)
    (named,) = answer.headers.get_list("x-request-id")
    assert answer.json()["id"] == f"cmpl-{named}"
    message = {"model": "specdec", "max_tokens": 1, "messages": [{"role": "user", "content": "Once"}]}
    refused = httpx.post(f"{on_ray.url}/v1/messages", json=message, headers={"x-api-key": KEY}, timeout=PATIENCE)
    assert refused.json()["type"] == "error" and "no chat template" in refused.json()["error"]["message"]
    assert on_ray.get("/health").json() == {"status": "ok"}
    assert on_ray.get("/ready").status_code == 200


def test_gpus_that_are_not_there_are_refused(on_ray: OnRay) -> None:
    """Keeps out: replicas that wait for ever for a GPU, without a word."""
    assert on_ray.refused.startswith("num_replicas=2, but the machines of the Ray cluster have room for 0 replicas of 1 GPU")
    assert "num_gpus=0" in on_ray.refused


def test_a_stream_passes_while_it_is_written(on_ray: OnRay, pair: SpecDecoder) -> None:
    """Keeps out: a proxy that collects a stream, and readers that left but whose requests run on."""
    (expected,) = pair.generate("The bear", SamplingParams(max_tokens=40))
    assert read(on_ray, "The bear", max_tokens=40, temperature=0) == expected.text
    with on_ray.slow_rounds():
        stream = on_ray.client().completions.create(model="specdec", prompt="The bear", stream=True, n=4, **LONG)
        next(stream)
        wait_until(lambda: on_ray.running() == 4, "the first text comes before the stream has ended")
        stream.close()
        wait_until(lambda: not on_ray.running(), "the requests of the reader that left have ended")


def test_a_replica_that_dies_loses_no_request_without_an_error(on_ray: OnRay, pair: SpecDecoder) -> None:
    """Keeps out: requests that hang, or streams that seem complete, when their replica dies; and a replica that stays away."""
    before = on_ray.samples("specdec_running", of=2)
    asked = PROMPTS[:6]
    with ThreadPoolExecutor(len(asked)) as pool:
        with on_ray.slow_rounds():
            running = [pool.submit((ask, read)[i % 2], on_ray, prompt, **LONG) for i, prompt in enumerate(asked)]
            wait_until(lambda: all(on_ray.samples("specdec_running").get(name) for name in before), "both replicas have some")
            on_ray.kill(victim := min(before))
        errors = [future.exception(timeout=300) for future in running]
    lost = [error for error in errors if error is not None]
    assert 1 <= len(lost) < len(asked), "the dead replica's requests fail, and the other's go on"
    assert all(isinstance(error, openai.APIError | httpx.TransportError) for error in lost), lost
    expected = [item.text for item in pair.generate(asked, SamplingParams(max_tokens=LONG["max_tokens"], ignore_eos=True))]
    texts = [None if error else future.result() for future, error in zip(running, errors)]
    assert texts == [None if error else text for error, text in zip(errors, expected)]

    assert ask(on_ray, "Once", max_tokens=8, temperature=0)  # the other one answers at once
    after = on_ray.samples("specdec_running", of=2)  # Ray has started another replica
    assert victim not in after and len(after.keys() & before.keys()) == 1
    (new,) = after.keys() - before.keys()
    wait_until(lambda: ask(on_ray, "Once", max_tokens=8) and on_ray.samples("specdec_requests_total").get(new), "it is asked")


def test_an_application_that_goes_lets_its_requests_finish(on_ray: OnRay, pair: SpecDecoder) -> None:
    """Keeps out: texts cut off by every update, and processes that outlive Ray."""
    (expected,) = pair.generate("Once", SamplingParams(max_tokens=LONG["max_tokens"], ignore_eos=True))
    before = sum(on_ray.samples("specdec_requests_total", of=2).values())

    def arrived() -> bool:
        runs = on_ray.running()
        return runs > 0 and runs + sum(on_ray.samples("specdec_requests_total").values()) - before >= 4

    with ThreadPoolExecutor(4) as pool:
        with on_ray.slow_rounds():
            running = [pool.submit(read, on_ray, "Once", **LONG) for _ in range(4)]
            wait_until(arrived, "all of them are there, and some run")
        on_ray.delete()
        assert [future.result(timeout=300) for future in running] == [expected.text] * 4
    assert on_ray.get("/ready").status_code == 404
    processes = on_ray.processes()
    assert len(processes) > 3
    on_ray.__exit__()
    wait_until(lambda: not processes & listed_processes().keys(), "every process of Ray has ended")
