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
from toolkit.models import Zoo
from toolkit.pages import ring_passes_take
from toolkit.traffic.traffic import Traffic, World, drive

from specdec import SamplingParams, SpecConfig, SpecDecoder

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
    "sources": ("llama", "eagle3+suffix+corpus+answers", {"spec": SpecConfig(3, 3, 12)}),
    "sources, kept chain": ("qwen2", "eagle1+answers", {"spec": SpecConfig(3, 1, 7, 6), "prefix_caching": True}),
    "sources, ring": ("mistral", "eagle3-window+suffix", {"spec": SpecConfig(3, 2, 8)}),
    "sources, one pass": ("llama", "dflash-mixed+corpus", {"spec": SpecConfig(3, 3, 9)}),
    "sources, kept hybrid": ("qwen3_5_text", "eagle1+suffix+answers", {"spec": SpecConfig(2, 3, 6), "prefix_caching": True}),
    "kept convolutions": ("lfm2", "eagle3", {"spec": SpecConfig(3, 2, 8), "prefix_caching": True}),
}

CROWDED = ("tree", "kept auto", "kept window", "ring auto")  # threads know less of an engine
KEPT = ("hybrid", "side by side", "convolutions", "states")  # in names of worlds whose targets are hybrids
INTRICATE = ("kept auto", "ring auto")  # where most parts of the engine meet: they get a second seed


def traffic_of(zoo: Zoo, world: str, seed: int) -> Traffic:
    target, head, settings = WORLDS[world]
    kept = 4 if settings.get("prefix_caching") and any(part in world for part in KEPT) else None
    traffic = Traffic(zoo, World(target, head, settings, kept), random.Random(f"{world} {seed}"))
    if world.startswith("ring") or world.endswith("ring"):
        assert traffic.driver.ring is not None
    if "window" in world or world == "mixed":
        assert traffic.driver.local_ring is not None
    return traffic


def small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few tokens a pass that short texts go around the ring."""
    ring_passes_take(16, monkeypatch)


@pytest.mark.slow_cases
@pytest.mark.parametrize(("world", "seed"), [*((world, 0) for world in WORLDS), *((world, 1) for world in INTRICATE)])
def test_random_traffic(zoo: Zoo, monkeypatch: pytest.MonkeyPatch, world: str, seed: int) -> None:
    small_rings(monkeypatch)
    assert drive(traffic_of(zoo, world, seed), events=60)[1] > 0


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


@pytest.mark.slow_cases(keep=0)
@pytest.mark.parametrize("world", CROWDED)
def test_random_crowd(zoo: Zoo, monkeypatch: pytest.MonkeyPatch, world: str) -> None:
    small_rings(monkeypatch)
    crowd(traffic_of(zoo, world, 7), threads=4, calls=4)
