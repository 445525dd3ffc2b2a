"""Every door of a decoder at once, from threads and from two event loops: each caller gets what it gets alone."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from toolkit.driver import Driver

from specdec import AsyncSpecDecoder, SamplingParams, SpecConfig, SpecDecoder, shipped
from specdec.generation import Generation, TokenLogprob

PROMPTS = ["Once upon a time", "The little bear", "Tom and his dog went", "One day"]
HELLO = [{"role": "user", "content": "hi"}]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
OF_TEXTS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 20},
    "sampled": {"max_tokens": 16, "temperature": 1.0, "top_p": 0.9, "seed": 1},
    "rules": {"max_tokens": 16, "frequency_penalty": 0.5, "logit_bias": {50: -5.0}, "bad_words": ["the"], "min_tokens": 4},
    "stop": {"max_tokens": 30, "stop": ["."]},
    "grammar": {"max_tokens": 16, "json_schema": SCHEMA, "temperature": 1.3, "seed": 4},
    "prediction": {"max_tokens": 20, "prediction": "there was a little girl named Lily. She loved to play"},
    "several": {"max_tokens": 10, "temperature": 1.0, "seed": 5, "n": 3},
}


def texts(outputs: Iterable[Generation]) -> list[tuple[list[int], str]]:
    return [(out.token_ids, str(out.finish_reason)) for out in outputs]


def tenths(listed: Iterable[TokenLogprob | None]) -> list[tuple[int, int] | None]:
    """Coarse enough for any company: rounding moves a log-probability in its seventh digit."""
    return [None if each is None else (each.token, round(each.logprob * 10)) for each in listed]


def stream_of(decoder: SpecDecoder, most: int | None = None) -> list[int] | None:
    """What a stream gives; None of one that is left after a few chunks."""
    chunks = list[int]()
    for number, chunk in enumerate(decoder.stream(PROMPTS[2], SamplingParams(max_tokens=24))):
        chunks += chunk.token_ids
        if number == most:
            return None
    return chunks


def refused(decoder: SpecDecoder) -> None:
    for prompt, length in (("x " * 3000, 4), ("a", 400)):
        with pytest.raises(ValueError, match="max_seq_len"):
            decoder.generate(prompt, SamplingParams(max_tokens=length))


def switch(decoder: SpecDecoder) -> None:
    decoder.set_drafting(False)
    decoder.set_drafting(True)


def doors_of(decoder: SpecDecoder) -> dict[str, Callable[[], Any]]:
    def written(given: dict[str, Any]) -> list[tuple[list[int], str]]:
        return texts(decoder.generate(PROMPTS[:2], SamplingParams(**given)))

    of_texts: dict[str, Callable[[], Any]] = {name: partial(written, given) for name, given in OF_TEXTS.items()}
    return of_texts | {
        "plain": lambda: texts(decoder.generate(PROMPTS[1], SamplingParams(max_tokens=12), speculate=False)),
        "stream": partial(stream_of, decoder),
        "a stream that is left": partial(stream_of, decoder, 2),
        "score": lambda: [tenths(each) for each in decoder.score(PROMPTS[:2])],
        "chat": lambda: decoder.chat(HELLO, SamplingParams(max_tokens=12)).content,
        "verify": lambda: decoder.verify(PROMPTS[0], SamplingParams(max_tokens=8)).passed,
        "trace": lambda: len(decoder.trace(PROMPTS[0], SamplingParams(max_tokens=8)).texts),
        "refused": partial(refused, decoder),
        "switched": partial(switch, decoder),
    }


async def coroutines(decoder: SpecDecoder, alone: dict[str, Any], wrong: list[str]) -> None:
    """Every coroutine of a decoder that other threads call too, three at a time."""
    shared = AsyncSpecDecoder(decoder)

    async def one(seed: int) -> None:
        out = await shared.generate(PROMPTS[0], SamplingParams(**OF_TEXTS["greedy"]))
        answer = await shared.chat(HELLO, SamplingParams(max_tokens=12))
        scores, ids = await shared.score(PROMPTS[0]), list[int]()
        async for chunk in shared.stream(PROMPTS[2], SamplingParams(max_tokens=24)):
            ids += chunk.token_ids
        left = asyncio.ensure_future(shared.generate(PROMPTS[0], SamplingParams(max_tokens=60)))
        for _ in range(seed):
            await asyncio.sleep(0)
        left.cancel()
        got = texts([out]) == alone["greedy"][:1], answer.content == alone["chat"]
        got += tenths(scores) == alone["score"][0], ids == alone["stream"]
        if not all(got):
            wrong.append(f"coroutines {got}")

    await asyncio.gather(*map(one, (0, 3, 40)))


@pytest.mark.slow
def test_each_door_gives_what_it_gives_alone(tmp_path: Path) -> None:
    """Keeps out: a text, a score or a chat that its company changes; a door that fails, or waits for ever, while others are
    used; rows, pages or rules that one door leaves to another."""
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    decoder = SpecDecoder.from_pretrained(
        shipped.target_folder(), [str(shipped.draft_folder()), "suffix"], SpecConfig(3, 3, 10), device="cpu", max_batch_size=3,
        max_seq_len=160, page_size=8, chat_template=tmp_path / "chat.jinja",
    )  # fmt: skip
    doors, wrong = doors_of(decoder), list[str]()
    alone = {name: door() for name, door in doors.items()}

    def call(seed: int) -> None:
        for name in random.Random(seed).sample(sorted(doors), len(doors)):
            try:
                if (got := doors[name]()) != alone[name]:
                    wrong.append(f"{name}: {got}, alone {alone[name]}")
            except Exception as error:
                wrong.append(f"{name}: {error!r}")

    def run_loop() -> None:
        try:
            asyncio.run(coroutines(decoder, alone, wrong))
        except Exception as error:
            wrong.append(f"coroutines: {error!r}")

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(2)]
    threads.append(threading.Thread(target=run_loop))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=600)
    assert not any(thread.is_alive() for thread in threads) and not wrong, wrong
    Driver(decoder).assert_nothing_leaked()
    decoder.close()
