"""Requests that end, are cancelled or fail don't change other requests, and all their pages come back.

Keeps out: pages lost or freed twice, rows mixed up when one leaves, an engine that is dead after one error.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from toolkit.driver import Driver, new_request
from toolkit.inside.hooks import wait_for
from toolkit.models import Zoo, ragged_prompts

from specdec import SamplingParams, SpecConfig, SpecDecoder

SPEC = SpecConfig(3, 4, 12)


class Boom(Exception):
    """The error that tests raise on purpose."""


@pytest.fixture(params=[0, 1], ids=lambda depth: f"depth{depth}")
def decoder(zoo: Zoo, request: pytest.FixtureRequest) -> Iterator[SpecDecoder]:
    """A decoder whose pool must be whole again when the test is over.  depth: rounds in flight when the oldest is read."""
    decoder = zoo.decoder("llama", "eagle3", SPEC, page_size=4, max_batch_size=4, max_seq_len=96)
    Driver(decoder).set_depth(request.param)
    yield decoder
    Driver(decoder).assert_nothing_leaked()


def failing_decode(at: int) -> Callable[[Any], str]:
    calls = iter(range(10_000))

    def decode(ids: Any) -> str:
        if next(calls) >= at:
            raise Boom("decode")
        return ""

    return decode


@pytest.mark.slow_cases
@pytest.mark.slow
def test_200_requests_some_cancelled_some_failing(zoo: Zoo, decoder: SpecDecoder) -> None:
    """Each of the other requests writes what it writes alone, and all pages are free at the end."""
    rng = random.Random(4)
    driver = Driver(decoder)
    prompts = ragged_prompts(40, 12, seed=1)
    requests, cancelled, failing = [], set(), set()
    for index in range(200):
        fails = rng.random() < 0.15
        decode = failing_decode(rng.randrange(8)) if fails else lambda ids: ""
        requests.append(new_request(rng.choice(prompts), rng.choice([1, 2, 5, 9, 14, 20]), decode=decode, streaming=True))
        failing |= {index} if fails else set()
    arrivals = iter(requests)
    while not all(request.is_done for request in requests):
        for _, request in zip(range(rng.randrange(4)), arrivals, strict=False):
            driver.add(request)
        if rng.random() < 0.1 and not driver.is_idle:
            victim = rng.choice([*driver.running, *driver.waiting])
            driver.cancel(victim)
            cancelled.add(requests.index(victim))
        driver.step()
        driver.assert_books_balance()
    for index, request in enumerate(requests):
        if index in cancelled:
            assert request.cancelled and request.error is None
        elif index not in failing or request.error is None:
            want = zoo.greedy("llama", request.prompt_ids, 24)[: request.sampling.max_tokens]
            assert request.result().token_ids == want
        else:
            with pytest.raises(RuntimeError, match="the request failed while it ran: decode"):
                request.result()
    assert len(cancelled) > 10 and sum(request.error is not None for request in requests) > 10


def test_cancelling_twice_or_too_late_changes_nothing(decoder: SpecDecoder) -> None:
    driver = Driver(decoder)
    waiting = [driver.add(new_request([index], 6)) for index in range(6)]
    driver.cancel(waiting[5])  # before it ran
    driver.step()
    driver.cancel(waiting[1])
    driver.cancel(waiting[1])
    driver.run_until_idle()
    driver.cancel(waiting[0])
    assert [request.cancelled for request in waiting] == [False, True, False, False, False, True]
    assert waiting[0].result().finish_reason == "length"


@pytest.mark.slow_cases
@pytest.mark.parametrize("phase", ["prefill", "draft prefill", "draft", "verify", "extend"])
def test_a_phase_that_raises_leaks_nothing(zoo: Zoo, decoder: SpecDecoder, phase: str) -> None:
    """Requests that ran get the error; the engine goes on, and requests that waited are served."""
    driver = Driver(decoder)
    prompts = ragged_prompts(40, 6, seed=3)
    requests = [driver.add(new_request(prompt, 4 + 3 * index)) for index, prompt in enumerate(prompts)]
    errors = 0
    with driver.fail_in(phase, Boom(phase), call=1):
        while not driver.is_idle:
            try:
                driver.step()
            except Boom:
                errors += 1
    failed = [request for request in requests if request.error is not None]
    assert (
        errors == ("prefill" not in phase) and 0 < len(failed) <= 4
    )  # a prefill that fails concerns only the requests in its chunk
    for request in requests:
        if request in failed:
            with pytest.raises(RuntimeError, match=phase) as info:
                request.result()
            assert isinstance(info.value.__cause__, Boom)
        else:
            want = zoo.greedy("llama", request.prompt_ids, 24)[: request.sampling.max_tokens]
            assert request.result().token_ids == want


def test_a_failed_prefill_leaves_running_streams_alone(zoo: Zoo, decoder: SpecDecoder) -> None:
    """Keeps out: a prompt that is too long for the memory and ends every open stream."""
    stream = decoder.stream([3, 4], SamplingParams(max_tokens=12))
    ids = list(next(stream).token_ids)
    with Driver(decoder).fail_in("prefill", Boom("memory")):
        with pytest.raises(RuntimeError, match="the request failed while it ran: memory"):
            decoder.generate([5, 6], SamplingParams(max_tokens=3))
    ids += [token for chunk in stream for token in chunk.token_ids]
    assert ids == zoo.greedy("llama", [3, 4], 24)[:12]


@pytest.mark.slow_cases
@pytest.mark.parametrize("size", [1, 3, 7, 16])
def test_chunked_prefill_equals_whole(zoo: Zoo, decoder: SpecDecoder, size: int) -> None:
    """Keeps out: a chunk's last pair that gets the target's guess instead of the prompt's next token; then the text stays
    right and acceptance falls, so accepted tokens are compared round by round."""
    prompts = [[*range(3, 20)], [7, 3] * 5, [1]]
    whole = decoder.generate(prompts, SamplingParams(max_tokens=16))
    before = Driver(decoder).set_chunk(size)
    chunked = decoder.generate(prompts, SamplingParams(max_tokens=16))
    Driver(decoder).set_chunk(before)
    assert [out.token_ids for out in chunked] == [out.token_ids for out in whole]
    assert [out.stats for out in chunked] == [out.stats for out in whole]


@pytest.mark.slow_cases
def test_generate_cleans_up_after_an_error(zoo: Zoo, decoder: SpecDecoder) -> None:
    """Keeps out: requests of a failed call that sit in the queue and run in the next one."""
    with Driver(decoder).fail_in("verify", Boom("verify")), pytest.raises(RuntimeError, match="while it ran: verify"):
        decoder.generate(ragged_prompts(40, 7), SamplingParams(max_tokens=5))
    Driver(decoder).assert_nothing_leaked()
    prompts = ragged_prompts(40, 7)
    outputs = decoder.generate(prompts, SamplingParams(max_tokens=5))
    assert [out.token_ids for out in outputs] == [zoo.greedy("llama", prompt, 24)[:5] for prompt in prompts]


@pytest.mark.slow_cases
def test_streams_and_generate_interleave(zoo: Zoo, decoder: SpecDecoder) -> None:
    """Two open streams and a call of generate share rounds; each gets its own tokens, all of them, in order."""
    prompts = ragged_prompts(40, 4, seed=6)
    streams = [decoder.stream(prompt, SamplingParams(max_tokens=20)) for prompt in prompts[:2]]
    got: list[list[int]] = [list(next(stream).token_ids) for stream in streams]
    outputs = decoder.generate(prompts[2:], SamplingParams(max_tokens=6))
    for ids, stream in zip(got, streams, strict=True):
        ids += [token for chunk in stream for token in chunk.token_ids]
    want = [zoo.greedy("llama", prompt, 24) for prompt in prompts]
    assert got == [ids[:20] for ids in want[:2]] and [out.token_ids for out in outputs] == [ids[:6] for ids in want[2:]]


def test_closing_a_stream_frees_its_place(decoder: SpecDecoder) -> None:
    """Keeps out: a stream that was closed and runs on to its end."""
    driver = Driver(decoder)
    with driver.rounds_by_hand() as let_run:
        streams = [decoder.stream([index], SamplingParams(max_tokens=60)) for index in range(4)]
        for stream in streams:
            let_run.release(2)
            next(stream)
        assert wait_for(lambda: len(driver.running) == 4)
        streams[1].close()
        let_run.release(2)
        assert wait_for(lambda: len(driver.running) == 3)
    assert len(decoder.generate([[9], [8]], SamplingParams(max_tokens=4))) == 2
    for stream in streams:
        stream.close()


def test_a_stream_that_is_never_read_is_freed(zoo: Zoo, decoder: SpecDecoder) -> None:
    """Keeps out: a generator that was made and dropped, whose request waits in the queue for ever."""
    stream = decoder.stream([3], SamplingParams(max_tokens=60))
    stream.close()
    (plain,) = decoder.generate([3, 4], SamplingParams(max_tokens=6), speculate=False)
    assert plain.token_ids == zoo.greedy("llama", [3, 4], 24)[:6]


def test_a_call_without_speculation_while_a_stream_with_it_is_open(zoo: Zoo, decoder: SpecDecoder) -> None:
    """Keeps out: one call's setting that another call's rounds obey."""
    stream = decoder.stream([3, 4], SamplingParams(max_tokens=12))
    ids = list(next(stream).token_ids)
    (plain,) = decoder.generate([3, 4], SamplingParams(max_tokens=5), speculate=False)
    assert plain.stats.drafted == 0
    ids += [token for chunk in stream for token in chunk.token_ids]
    assert ids == zoo.greedy("llama", [3, 4], 24)[:12] and plain.token_ids == ids[:5]


@pytest.mark.slow_cases
def test_requests_wait_for_pages_too(zoo: Zoo, decoder: SpecDecoder) -> None:
    """Keeps out: an admission that counts rows only, and runs out of pages in the middle of a round."""
    prompts = [prompt for prompt in ragged_prompts(40, 12, seed=1) if len(prompt) <= 30][:7]
    with Driver(decoder).leave_room_for(30 + 20, 30 + 20):
        outputs = decoder.generate(prompts, SamplingParams(max_tokens=20))
    assert [out.token_ids for out in outputs] == [zoo.greedy("llama", prompt, 24)[:20] for prompt in prompts]


def test_phases_count_batch_wide_rounds(decoder: SpecDecoder) -> None:
    """Keeps out: rounds of the batch guessed from rounds of the rows, which differ whenever rows enter and leave."""
    with Driver(decoder).timed_phases() as clock:
        outputs = decoder.generate(ragged_prompts(40, 3), SamplingParams(max_tokens=9))
    assert clock.calls["prefill"] == 1
    assert clock.calls["draft"] == clock.calls["verify"] == max(out.stats.rounds for out in outputs)
    assert clock.seconds.keys() >= {"prefill", "draft", "verify", "extend"}


def test_a_stream_returns_its_generation(zoo: Zoo, decoder: SpecDecoder) -> None:
    stream = decoder.stream([3, 4], SamplingParams(max_tokens=12))
    ids = []
    while True:
        try:
            ids += next(stream).token_ids
        except StopIteration as end:
            assert end.value.token_ids == ids == zoo.greedy("llama", [3, 4], 24)[:12]
            break
