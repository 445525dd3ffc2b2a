"""Random traffic: requests arrive, are cancelled and fail at random, in chunks of random sizes, and nobody else notices.

The oracle is the request alone, in a decoder of its own without a drafter.  Every text that survives must equal it, every text
that was cut off must be its beginning, and nothing may be left behind.  Keeps out: a row, a page or a kept prefix that one
request's end or failure changes under another.
"""

import random
import threading
from typing import Any

import pytest
import toolkit.heads.block_zoo
import toolkit.recurrent.mamba_targets
import toolkit.recurrent.more_targets
import toolkit.recurrent.targets  # noqa: F401 (and its targets)
from toolkit.driver import Driver
from toolkit.inside.hooks import PHASES
from toolkit.models import Zoo
from toolkit.pages import ring_passes_take

from specdec import SamplingParams, SpecConfig, SpecDecoder
from specdec.engine.request import Request

SYSTEM = [(7 * i * i + 3 * i) % 40 for i in range(45)]  # what many prompts begin with, longer than several pages
# name: target, head, settings.  float64, so that no near-tie decides; "ring": every layer of both models has a window;
# "window" and "mixed": some layers have one.
WORLDS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "plain": ("llama", None, {}),
    "chain": ("llama", "eagle3", {"spec": SpecConfig(3, 1, 4)}),
    "tree": ("llama", "eagle1", {"spec": SpecConfig(3, 4, 12)}),
    "auto": ("llama", "eagle3", {"spec": SpecConfig("auto", 2, 8)}),
    "kept": ("llama", "eagle3", {"spec": SpecConfig(2, 3, 6), "prefix_caching": True}),
    "kept auto": ("qwen2", "eagle1", {"spec": SpecConfig("auto", 2, 8), "prefix_caching": True}),
    "window": ("mistral", "eagle1", {"spec": SpecConfig(3, 2, 8)}),
    "kept window": ("mistral", "eagle1", {"spec": SpecConfig(3, 2, 8), "prefix_caching": True}),
    "mixed": ("qwen2", "eagle1-window", {"spec": SpecConfig(3, 2, 8)}),
    "ring": ("mistral", "eagle3-window", {"spec": SpecConfig(3, 2, 8)}),
    "one pass": ("llama", "p-eagle", {"spec": SpecConfig("auto", 2, 6), "prefix_caching": True}),
    "one pass mixed": ("llama", "dflash-mixed", {"spec": SpecConfig(3, 3, 9)}),
    "one pass chosen": ("qwen3", "dflash2", {"spec": SpecConfig("auto", 4, 12), "prefix_caching": True}),
    "ring auto": ("mistral", "eagle1-window", {"spec": SpecConfig("auto", 2, 8)}),
    "hybrid": ("qwen3_next", "eagle3", {"spec": SpecConfig(3, 4, 12)}),
    "hybrid auto": ("qwen3_5_text", "eagle1", {"spec": SpecConfig("auto", 2, 8)}),
    "one block": ("nemotron_h", "eagle3", {"spec": SpecConfig(3, 3, 9)}),
    "kept side by side": ("falcon_h1", "eagle1", {"spec": SpecConfig(2, 3, 6), "prefix_caching": True}),
    "kept hybrid": ("qwen3_5_text", "eagle1", {"spec": SpecConfig(2, 3, 6), "prefix_caching": True}),
    "post-norm hybrid": ("olmo_hybrid", "eagle1", {"spec": SpecConfig(3, 4, 12)}),
    "kept latents and states": ("kimi_linear", "eagle3", {"spec": SpecConfig(3, 2, 8), "prefix_caching": True}),
    "kept convolutions": ("lfm2", "eagle3", {"spec": SpecConfig(3, 2, 8), "prefix_caching": True}),
}

CROWDED = ("tree", "kept auto", "kept window", "ring auto")  # threads know less of an engine
INTRICATE = ("kept auto", "ring auto")  # where most parts of the engine meet: they get a second seed


class Traffic:
    """One decoder, what its requests write alone, and a source of chance."""

    def __init__(self, zoo: Zoo, world: str, seed: int) -> None:
        self.random = random.Random(f"{world} {seed}")
        target, head, settings = WORLDS[world]
        spec = settings.get("spec")
        more = {key: value for key, value in settings.items() if key != "spec"}
        rows, page = self.random.choice([1, 2, 3, 5]), self.random.choice([1, 3, 4, 16])
        self.decoder = zoo.decoder(
            target, head, spec, dtype="float64", page_size=page, max_batch_size=rows, max_seq_len=160, **more
        )
        self.driver = Driver(self.decoder)
        if world in ("kept hybrid", "kept side by side", "kept convolutions", "kept latents and states"):
            self.driver.keep_states_from(4)
        if world.startswith("ring"):
            assert self.driver.ring is not None
        if "window" in world or world == "mixed":
            assert self.driver.local_ring is not None
        self.alone = zoo.decoder(target, None, None, dtype="float64", page_size=page, max_batch_size=1, max_seq_len=160)
        self.texts: dict[tuple[Any, ...], list[int]] = {}

    def ask(self) -> tuple[list[int], SamplingParams]:
        """A prompt that shares its beginning with others, often, and how to sample from it."""
        chance = self.random
        prompt = SYSTEM[: chance.choice([0, 0, 5, 17, 33, 45])] + [chance.randrange(40) for _ in range(chance.randrange(1, 4))]
        if chance.random() < 0.2:
            prompt = [chance.randrange(40) for _ in range(chance.randrange(1, 110))]
        options: dict[str, Any] = chance.choice([{}, {}, {"temperature": 0.9}, {"temperature": 1.3, "top_k": 5, "top_p": 0.9}])
        if options:
            options["seed"] = chance.randrange(3)
        if chance.random() < 0.3:
            options["stop_token_ids"] = [chance.randrange(40)]
        return prompt, SamplingParams(max_tokens=chance.choice([1, 2, 9, 30]), **options)

    def want(self, prompt: list[int], sampling: SamplingParams) -> list[int]:
        """What it writes alone."""
        key = (tuple(prompt), sampling)
        if key not in self.texts:
            self.texts[key] = self.alone.generate([prompt], sampling)[0].token_ids
        return self.texts[key]

    def check(self, asked: list[tuple[Request, bool]]) -> int:
        """Compares every request's tokens with the text alone.  How many finished."""
        finished = 0
        for request, speculate in asked:
            want, got = self.want(request.prompt_ids, request.sampling), request.output.token_ids
            is_whole = request.error is None and not request.cancelled
            assert got == (want if is_whole else want[: len(got)]), (request.prompt_ids, request.sampling, speculate)
            finished += is_whole
        return finished


def small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few tokens a pass that short texts go around the ring."""
    ring_passes_take(16, monkeypatch)


def drive(traffic: Traffic, events: int) -> None:
    """So many random events in one thread, then whatever is left runs to its end.  Rows step back in between."""
    chance, driver = traffic.random, traffic.driver
    speculating = chance.choice([0.2, 0.7, 0.7, 1.0])
    driver.set_depth(chance.choice([0, 1, 1, 2]))
    with driver.stepping_back(random.Random(events), 0.1):
        asked = disturb(traffic, events, speculating)
    driver.assert_nothing_leaked()
    assert traffic.check(asked) > 0


def disturb(traffic: Traffic, events: int, speculating: float) -> list[tuple[Request, bool]]:
    """What was asked for.  speculating: the share of requests that speculate."""
    chance, driver = traffic.random, traffic.driver
    asked: list[tuple[Request, bool]] = []
    for _ in range(events):
        event = chance.random()
        if event < 0.25:
            speculate = chance.random() < speculating
            prompt, sampling = traffic.ask()
            asked.append((driver.submit(prompt, sampling, speculate, streaming=chance.random() < 0.3), speculate))
        elif event < 0.32 and asked:
            driver.cancel(chance.choice(asked[-6:])[0])
        elif event < 0.36:
            driver.set_chunk(chance.choice([1, 2, 7, 20, 64, 10**6]))
            spec, mixes = traffic.decoder.settings.spec, traffic.decoder.model.config.recurrent is None
            if mixes and (spec is None or not spec.is_auto):
                driver.mix(chance.choice([None, 1, 20, 100]))
        elif event < 0.40:
            phases = [phase for phase in PHASES if driver.drafter is not None or PHASES[phase][0] != "drafter"]
            error: BaseException = chance.choice([ValueError("x"), MemoryError("x"), KeyboardInterrupt()])
            with driver.fail_in(chance.choice(phases), error, call=0):
                try:
                    driver.step()
                except type(error):
                    pass
        elif event < 0.42 and asked:
            break_output(chance.choice(asked[-6:])[0])
        else:
            driver.step()
        driver.assert_books_balance()
    driver.run_until_idle()
    return asked


def break_output(request: Request) -> None:
    """Its tokenizer fails from now on."""

    def fail(*_: Any) -> int:
        raise OSError("the tokenizer broke")

    request.output.take = fail  # type: ignore[method-assign]


@pytest.mark.slow_cases
@pytest.mark.parametrize(("world", "seed"), [*((world, 0) for world in WORLDS), *((world, 1) for world in INTRICATE)])
def test_random_traffic(zoo: Zoo, monkeypatch: pytest.MonkeyPatch, world: str, seed: int) -> None:
    small_rings(monkeypatch)
    drive(Traffic(zoo, world, seed), events=60)


def crowd(traffic: Traffic, threads: int, calls: int) -> None:
    """Threads that generate, stream, and drop their streams, all at once."""
    jobs = [[(*traffic.ask(), traffic.random.random()) for _ in range(calls)] for _ in range(threads)]
    wrong: list[Any] = []
    for job in jobs:
        for prompt, sampling, _ in job:
            traffic.want(prompt, sampling)

    def work(job: list[tuple[list[int], SamplingParams, float]], decoder: SpecDecoder) -> None:
        try:
            for prompt, sampling, kind in job:
                want, speculate = traffic.want(prompt, sampling), (1000 * kind) % 1 < 0.6
                if kind < 0.4:
                    got = decoder.generate([prompt, prompt[:3]], sampling, speculate=speculate)[0].token_ids
                    wrong.extend([] if got == want else [(prompt, sampling, got)])
                    continue
                got, stream = [], decoder.stream(prompt, sampling, speculate=speculate)
                for chunk in stream:
                    got += chunk.token_ids
                    if kind > 0.7:
                        break
                stream.close()
                wrong.extend([] if got == want[: len(got)] and (kind > 0.7 or got == want) else [(prompt, sampling, got)])
        except BaseException as error:  # of any kind: the main thread compares, and would not see it
            wrong.append(error)
            raise

    traffic.driver.set_chunk(traffic.random.choice([1, 7, 64]))
    workers = [threading.Thread(target=work, args=(job, traffic.decoder), daemon=True) for job in jobs]
    with traffic.driver.stepping_back(random.Random(calls), 0.1):
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(timeout=600)
    assert not any(worker.is_alive() for worker in workers) and not wrong, wrong
    traffic.driver.assert_nothing_leaked()


@pytest.mark.slow_cases
@pytest.mark.parametrize("world", CROWDED)
def test_random_crowd(zoo: Zoo, monkeypatch: pytest.MonkeyPatch, world: str) -> None:
    small_rings(monkeypatch)
    crowd(Traffic(zoo, world, 7), threads=4, calls=4)
