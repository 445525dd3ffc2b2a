"""AsyncSpecDecoder: coroutines share one batch, leaving ends a request, and no error stays with the engine's thread."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
from toolkit.driver import Driver
from toolkit.inside.hooks import wait_for
from toolkit.models import Zoo, ragged_prompts

from specdec import AsyncSpecDecoder, SamplingParams, SpecConfig, SpecDecoder

GREEDY = SamplingParams(max_tokens=20)
LONG = SamplingParams(max_tokens=80)


@pytest.fixture()
def decoder(zoo: Zoo) -> Iterator[SpecDecoder]:
    decoder = zoo.decoder("llama", "eagle3", SpecConfig(3, 4, 12), page_size=4, max_batch_size=3, max_seq_len=96)
    yield decoder
    Driver(decoder).assert_nothing_leaked()


def test_coroutines_share_the_batch(zoo: Zoo, decoder: SpecDecoder) -> None:
    """Keeps out: tokens that reach another coroutine, chunks that are lost or come twice, a stream without its last chunk."""
    prompts = ragged_prompts(40, 8, seed=7)
    shared = AsyncSpecDecoder(decoder)

    async def one(index: int) -> list[int]:
        if index % 2:
            return (await shared.generate(prompts[index], GREEDY, speculate=index % 4 == 1)).token_ids
        stream = shared.stream(prompts[index], GREEDY)
        ids = [token async for chunk in stream for token in chunk.token_ids]
        assert stream.result().token_ids == ids
        return ids

    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*(one(index) for index in range(8)))

    assert asyncio.run(all_of_them()) == [zoo.greedy("llama", prompt, 24)[:20] for prompt in prompts]
    assert asyncio.run(all_of_them()) == [zoo.greedy("llama", prompt, 24)[:20] for prompt in prompts]  # in another event loop


@pytest.mark.parametrize("how", ["break", "aclose", "cancel", "cancel generate"])
def test_leaving_ends_the_request(decoder: SpecDecoder, how: str) -> None:
    """Keeps out: a request that nobody reads any more and that holds its row and pages to its end."""
    shared, driver = AsyncSpecDecoder(decoder), Driver(decoder)

    async def leave() -> None:
        if how == "break":
            async for _ in shared.stream([3, 4], LONG):
                break
        elif how == "aclose":
            stream = shared.stream([3, 4], LONG)
            await anext(stream)
            await stream.aclose()
            with pytest.raises(StopAsyncIteration):
                await anext(stream)
            with pytest.raises(RuntimeError, match="has not come to its end"):
                stream.result()
        else:
            asked = shared.generate([3, 4], LONG) if how == "cancel generate" else read(shared)
            task = asyncio.create_task(asked)  # type: ignore[arg-type]
            while not driver.running:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    async def read(shared: AsyncSpecDecoder) -> None:
        async for _ in shared.stream([3, 4], LONG):
            pass

    with driver.rounds_by_hand() as let_run:
        let_run.release(2)
        asyncio.run(leave())
        let_run.release(2)
        assert wait_for(lambda: driver.is_idle), how
    assert driver.ended["cancelled"] == 1


def test_an_event_loop_that_has_gone(zoo: Zoo, decoder: SpecDecoder) -> None:
    """Keeps out: an engine's thread that ends with an error, or a request that runs on, when its event loop is closed."""
    shared, driver = AsyncSpecDecoder(decoder), Driver(decoder)
    kept = []

    async def begin() -> None:
        stream = shared.stream([3, 4], LONG)
        await anext(stream)
        kept.append(stream)  # outlives the event loop

    with driver.rounds_by_hand() as let_run:
        let_run.release(2)
        asyncio.run(begin())
        let_run.release(4)
        assert wait_for(lambda: driver.is_idle)
    (after,) = decoder.generate([3, 4], GREEDY)
    assert after.token_ids == zoo.greedy("llama", [3, 4], 24)[:20]


def test_a_request_runs_once(decoder: SpecDecoder) -> None:
    """Keeps out: a finished request that is submitted again and holds a row and pages that nobody frees any more."""
    shared = AsyncSpecDecoder(decoder)

    async def twice() -> None:
        request = await shared.new_request([3, 4], GREEDY, streaming=True)
        await shared.run(request)
        with pytest.raises(ValueError, match="runs only once"):
            await shared.run(request)
        with pytest.raises(ValueError, match="runs only once"):
            await anext(shared.chunks(request))
        with pytest.raises(ValueError, match="made with streaming=True; nearest thing that works: run"):
            await anext(shared.chunks(await shared.new_request([3, 4], GREEDY)))

    asyncio.run(twice())


def test_a_stream_that_another_task_closes(decoder: SpecDecoder) -> None:
    """Keeps out: a reader that is told of a result that a cancelled request does not have."""
    shared, driver = AsyncSpecDecoder(decoder), Driver(decoder)

    async def close_while_reading() -> None:
        first = asyncio.create_task(shared.generate([3, 4], GREEDY))
        while not driver.running:  # its first round waits, so that the request below ends before it has a token
            await asyncio.sleep(0.001)
        request = await shared.new_request([5, 6], GREEDY, streaming=True)
        stream = shared.chunks(request)
        reading = asyncio.create_task(anext(stream, None))
        while not request.is_submitted:
            await asyncio.sleep(0.001)
        await stream.aclose()
        let_run.release(40)
        assert await reading is None
        await first

    with driver.rounds_by_hand() as let_run:
        asyncio.run(close_while_reading())


def test_bad_input_is_refused_before_anything_runs(decoder: SpecDecoder) -> None:
    shared = AsyncSpecDecoder(decoder)

    async def ask(*args: object, **more: object) -> None:
        await shared.generate(*args, **more)  # type: ignore[arg-type]

    for args, more, said in (
        (([[1], [2]],), {}, "prompt must be one string, .* nearest thing that works for several prompts: asyncio.gather"),
        (([1], [GREEDY]), {}, "sampling must be a SamplingParams"),
        (([1], GREEDY), {"speculate": 1}, "speculate must be a bool"),
        (([99999],), {}, "token id 99999"),
        (([1], SamplingParams(max_tokens=1000)), {}, "nearest setting that works: max_tokens=95"),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            asyncio.run(ask(*args, **more))

    async def read() -> None:
        async for _ in shared.stream([[1]]):
            pass

    with pytest.raises(TypeError, match="prompt must be one string"):
        asyncio.run(read())


def test_a_request_that_fails_tells_its_own_coroutine(zoo: Zoo, decoder: SpecDecoder) -> None:
    """Keeps out: an error that ends the others, or is never seen."""
    shared = AsyncSpecDecoder(decoder)

    async def both() -> list[object]:
        with patch.object(decoder.tokenizer, "decode", side_effect=ValueError("no text today")):
            failing = await shared.new_request([5, 6], GREEDY)
        return await asyncio.gather(shared.run(failing), shared.generate([3, 4], GREEDY), return_exceptions=True)

    failed, fine = asyncio.run(both())
    assert isinstance(failed, RuntimeError) and "no text today" in str(failed)
    assert fine.token_ids == zoo.greedy("llama", [3, 4], 24)[:20]  # type: ignore[attr-defined]


def test_a_request_that_is_run_twice_at_once(zoo: Zoo, decoder: SpecDecoder) -> None:
    """Keeps out: a request that is run twice: one caller waited for ever while the engine's thread span, and the other's output
    was cancelled."""
    shared = AsyncSpecDecoder(decoder)

    async def twice() -> None:
        request = await shared.new_request([3, 4], GREEDY)
        both = asyncio.gather(shared.run(request), shared.run(request), return_exceptions=True)
        first, second = await asyncio.wait_for(both, 120)
        assert isinstance(second, ValueError) and "runs only once" in str(second)
        assert not isinstance(first, BaseException) and first.token_ids == zoo.greedy("llama", [3, 4], 24)[:20]
        with pytest.raises(ValueError, match="runs only once"):
            await shared.run(request)

    asyncio.run(twice())


@pytest.mark.parametrize("wrong", ["text", None, [3, 4]])
def test_what_is_no_request_is_refused(decoder: SpecDecoder, wrong: Any) -> None:
    """Keeps out: a prompt handed to `run` or `chunks`, which ended the engine's thread, and with it every answer."""
    shared = AsyncSpecDecoder(decoder)

    async def ask() -> None:
        with pytest.raises(TypeError, match="request must come from new_request"):
            await shared.run(wrong)
        with pytest.raises(TypeError, match="request must come from new_request"):
            await anext(shared.chunks(wrong))
        assert (await asyncio.wait_for(shared.generate([3], GREEDY), 120)).token_ids

    asyncio.run(ask())


def test_a_stream_that_another_task_closes_or_reads(decoder: SpecDecoder) -> None:
    """Keeps out: an AssertionError in the task that waits for a chunk of a stream that is closed; a request that runs on for a
    stream that was closed while its prompt was encoded; two tasks that read one stream, of which one request is lost."""
    shared = AsyncSpecDecoder(decoder)

    async def ask() -> None:
        for has_begun in (False, True):
            stream = shared.stream([3], LONG)
            with Driver(decoder).rounds_by_hand() as let_run:
                if has_begun:
                    await anext(stream)  # the prompt's token; the next one needs a round
                reading = asyncio.create_task(anext(stream, None))
                await asyncio.sleep(0)
                with pytest.raises(RuntimeError, match="another task waits"):
                    await anext(stream)
                await stream.aclose()
                let_run.release(3)
                assert await asyncio.wait_for(reading, 120) is None
            assert await anext(stream, None) is None

    asyncio.run(ask())
