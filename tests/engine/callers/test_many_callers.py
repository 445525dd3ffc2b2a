"""One decoder called from several threads, from coroutines and from a forked child.

Keeps out: two calls at once that wrote wrong text without an error, and a fork that hangs in its first product.
"""

import asyncio
import os
import threading

import pytest
from toolkit.driver import Driver
from toolkit.models import Zoo, ragged_prompts

from specdec import SamplingParams, SpecConfig

SPEC = SpecConfig(3, 4, 12)


@pytest.mark.slow_cases
@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 1])
def test_threads_share_the_batch(zoo: Zoo, depth: int) -> None:
    """Every call gets what it gets alone, whichever call's steps computed it; streams too."""
    decoder = zoo.decoder("llama", "eagle3", SPEC, page_size=4, max_batch_size=3, max_seq_len=96)
    Driver(decoder).set_depth(depth)
    prompts = ragged_prompts(40, 8, seed=7)
    got: dict[int, list[list[int]]] = {}

    def generate(index: int) -> None:
        got[index] = []
        for turn in range(4):
            prompt = prompts[(index + turn) % 8]
            if index % 2:
                chunks = decoder.stream(prompt, SamplingParams(max_tokens=20))
                got[index].append([token for chunk in chunks for token in chunk.token_ids])
            else:
                (out,) = decoder.generate(prompt, SamplingParams(max_tokens=20))
                got[index].append(out.token_ids)

    threads = [threading.Thread(target=generate, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not any(thread.is_alive() for thread in threads)
    for index in range(6):
        assert got[index] == [zoo.greedy("llama", prompts[(index + turn) % 8], 24)[:20] for turn in range(4)]
    Driver(decoder).assert_nothing_leaked()


def test_coroutines_through_threads(zoo: Zoo) -> None:
    """asyncio.to_thread twice, as a first try at serving does."""
    decoder = zoo.decoder("llama", "eagle3", SPEC, page_size=4, max_batch_size=3, max_seq_len=96)
    prompts = ragged_prompts(40, 4, seed=8)

    async def both() -> list[list[int]]:
        calls = [asyncio.to_thread(decoder.generate, prompt, SamplingParams(max_tokens=20)) for prompt in prompts]
        return [out[0].token_ids for out in await asyncio.gather(*calls)]

    assert asyncio.run(both()) == [zoo.greedy("llama", prompt, 24)[:20] for prompt in prompts]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_is_told_so(zoo: Zoo) -> None:
    """In the child every call raises at once, before torch is asked for anything."""
    decoder = zoo.decoder("llama", "eagle3", SPEC)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing was raised"
        try:
            decoder.generate([3, 4], SamplingParams(max_tokens=3))
        except RuntimeError as error:
            said = str(error)
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    assert "can't be used in its fork" in said and "spawn" in said
    (out,) = decoder.generate([3, 4], SamplingParams(max_tokens=6))
    assert out.token_ids == zoo.greedy("llama", [3, 4], 24)[:6]


def test_a_request_that_streams_runs_to_its_end(zoo: Zoo) -> None:
    """Keeps out: `run` that takes the first chunk for the end."""
    decoder = zoo.decoder("llama", "eagle3", SPEC, max_seq_len=96)
    requests = [
        decoder.new_request([3, 4], SamplingParams(max_tokens=20), streaming=streams) for streams in (True, False, True)
    ]
    assert [out.token_ids for out in decoder.run(requests)] == [zoo.greedy("llama", [3, 4], 24)[:20]] * 3


def test_a_request_that_runs_is_refused_and_goes_on(zoo: Zoo) -> None:
    """Keeps out: a second `run` of a request, which is refused, that cancels it for whoever waits for it."""
    decoder = zoo.decoder("llama", "eagle3", SPEC, max_seq_len=96)
    request = decoder.new_request([3, 4], SamplingParams(max_tokens=60))
    got: list[list[int]] = []
    thread = threading.Thread(target=lambda: got.append(decoder.run([request])[0].token_ids))
    thread.start()
    while not request.is_submitted:
        pass
    with pytest.raises(ValueError, match="a request runs only once"):
        decoder.run([request])
    thread.join(timeout=60)
    assert got == [zoo.greedy("llama", [3, 4], 60)]
