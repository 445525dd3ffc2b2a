"""Several decoders, threads and coroutines on one GPU, and what a closed decoder leaves behind there."""

from __future__ import annotations

import asyncio
import gc
import json
import threading

import pytest
import torch
from toolkit.driver import Driver

from specdec import AsyncSpecDecoder, SamplingParams, SpecConfig, SpecDecoder
from specdec.shipped import draft_folder, prompts_file, target_folder

pytestmark = pytest.mark.gpu

GREEDY = SamplingParams(max_tokens=48)


def prompts(count: int) -> list[str]:
    return [json.loads(line)["prompt"] for line in prompts_file().read_text().splitlines()[:count]]


def load(**settings: object) -> SpecDecoder:
    merged = {"spec": SpecConfig(5, 4, 16), "dtype": "float32", "max_seq_len": 256, "device": "cuda", **settings}
    return SpecDecoder.from_pretrained(target_folder(), draft_folder(), **merged)  # type: ignore[arg-type]


def test_two_decoders_capture_at_the_same_time() -> None:
    """Keeps out: a capture that fails since another decoder's thread allocates memory or reads tokens meanwhile."""
    asked = prompts(8)
    expected = [out.token_ids for out in load().generate(asked, GREEDY)]
    decoders = [load(), load(spec=SpecConfig(5, 1, 6))]
    got: list[list[list[int]]] = [[], []]

    def serve(index: int) -> None:
        for count in (1, 2, 3, 5, 8):  # each batch size is captured while the other decoder runs
            got[index] = [out.token_ids for out in decoders[index].generate(asked[:count], GREEDY)]

    threads = [threading.Thread(target=serve, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [expected, expected]


def test_coroutines_on_a_gpu() -> None:
    """Keeps out: chunks that reach another stream, and a stream that was left and goes on writing."""
    asked = prompts(12)
    expected = [out.text for out in load().generate(asked, GREEDY)]

    async def read(decoder: AsyncSpecDecoder, index: int) -> str:
        if index % 4 == 3:
            async for _ in decoder.stream(asked[index], GREEDY):
                return expected[index]
        return "".join([chunk.text async for chunk in decoder.stream(asked[index], GREEDY, speculate=index % 2 == 0)])

    async def main() -> list[str]:
        async with AsyncSpecDecoder(load()) as decoder:
            return await asyncio.gather(*(read(decoder, index) for index in range(12)))

    assert asyncio.run(main()) == expected


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_close_gives_all_memory_back(prefix_caching: bool) -> None:
    """Keeps out: graphs, pools and workspaces that stay after `close`, so that a second decoder gets fewer pages."""
    left, pages = [], set()
    for _ in range(4):
        with load(prefix_caching=prefix_caching) as decoder:
            pages.add(Driver(decoder).pages_total)
            assert ids_of(decoder, 8)[:3] == ids_of(decoder, 3)
            assert torch.cuda.memory_allocated() > 100e6
        gc.collect()
        left.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert left[1:] == left[:1] * 3, "nothing stays but what the first decoder left"
    assert left[0][0] < 1e6 and left[0][1] < 64e6, "small tensors of indices, which all decoders of a process share"
    assert prefix_caching or len(pages) == 1


def ids_of(decoder: SpecDecoder, count: int) -> list[list[int]]:
    return [out.token_ids for out in decoder.generate(prompts(count), GREEDY)]
