"""What decides whether chunks and rounds should share a pass: the pass that is measured, and the simulation over its times."""

from __future__ import annotations

import importlib
import json
from types import ModuleType
from typing import Any

import pytest
import torch
from toolkit.paths import ROOT

from specdec import SpecConfig

CHAIN, TREE = SpecConfig(5, 1, 6), SpecConfig(3, 4, 10)


@pytest.fixture()
def part(monkeypatch: pytest.MonkeyPatch):
    """Imports a module of benchmarks/serving."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))

    def load(name: str) -> ModuleType:
        return importlib.import_module(f"serving.{name}")

    return load


@pytest.mark.parametrize("spec", [CHAIN, TREE])
@torch.inference_mode()
def test_a_mixed_pass_computes_what_two_passes_do(part, spec: SpecConfig) -> None:
    """Keeps out: a measured pass that is quick because it leaves something out, or reads the wrong keys."""
    times = part("mixed_times")
    sizes = times.TINY._replace(batches=(3,))
    passes = times.Passes(times.tiny_decoder(spec, sizes), 3, spec, sizes.context)
    passes.state.lens_B[:3] -= torch.tensor([0, 5, 17], dtype=torch.int32)
    caches = [cache.buffers["kv"] for cache in (passes.workers.verifier.cache, *passes.drafter.caches)]
    changed = [passes.state.lens_B, passes.state.bonus_B, *passes.drafter.changed(passes.state), *caches]
    before = [tensor.clone() for tensor in changed]
    prompts = passes.prompts(passes.part(21, 16))

    def results(run: Any) -> list[torch.Tensor]:
        for tensor, value in zip(changed, before, strict=True):
            tensor.copy_(value)
        return [*run(), *(tensor.clone() for tensor in changed)]

    apart = results(lambda: (passes.round(3), passes.chunk(prompts)))
    together = results(lambda: passes.mixed(3, prompts))
    assert not torch.equal(apart[-2], before[-2]) and apart[2].tolist() != before[0].tolist(), "keys and lengths change"
    for one, other in zip(apart, together, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def made_up(saved_ms: float) -> dict[str, Any]:
    """Times of passes as the measuring script writes them.  saved_ms: what a mixed pass takes less than two passes."""
    rounds = [{"batch": batch, "context": 2304, "round_ms": 4.0 + batch / 10} for batch in (1, 8)]
    rounds.append({"batch": 8, "context": 4096, "round_ms": 5.0})
    chunks = [{"tokens": tokens, "cached": 0, "chunk_ms": 2 + tokens / 50} for tokens in (64, 256, 1024, 2048)]
    chunks.append({"tokens": 1024, "cached": 4096, "chunk_ms": 2 + 1024 / 50 + 8})
    mixed = []
    for total in (256, 1024, 2048):
        for batch in (1, 8):
            tokens = total - 6 * batch
            attention = 8 * tokens / 1024 * 1024 / 4096
            both = 4.0 + batch / 10 + 2 + tokens / 50 + attention - saved_ms
            line = {"batch": batch, "total": total, "cached": 1024, "round_ms": 4.0 + batch / 10}
            mixed.append({**line, "mixed_ms": both})
    return {"quantize": "none", "spec": "5,1,6", "nodes": 6, "rounds": rounds, "chunks": chunks, "mixed": mixed}


def test_steps_take_what_was_measured(part) -> None:
    """Keeps out: a mixed pass whose attention is counted twice, or a chunk's whose tokens before it are not."""
    load = part("mixed_load")
    times, parts = load.StepTimes(made_up(3.0)), [load.PromptPart(0, [7] * 1024, 0, 7)]
    assert times.chunk(parts) == pytest.approx((2 + 1024 / 50) / 1e3)
    later = [load.PromptPart(0, [7] * 1024, 4096, 7)]
    assert times.chunk(later) == pytest.approx((2 + 1024 / 50 + 8) / 1e3)
    assert times.round(8, 8 * 2304) == pytest.approx(4.8e-3) and times.round(8, 8 * 4096) == pytest.approx(5e-3)
    assert times.mixed(8, 8 * 2304, [load.PromptPart(0, [7] * 976, 1024, 7)]) == pytest.approx(
        (4.8 + 2 + 976 / 50 + 8 * 976 / 4096 - 3) / 1e3
    )


@pytest.mark.parametrize("load", [None, 3.0])
def test_every_request_is_served_by_either_policy(part, load: float | None) -> None:
    """Keeps out: a row that is in a round before its prompt has run, and a clock that forgets a step."""
    sim = part("mixed_load")
    times, coming = sim.StepTimes(made_up(3.0)), sim.arrivals(24, load, 1)
    records: list[Any] = []
    found = {}
    for name in ("turns:1024", "mixed:1024"):
        found[name] = sim.simulate(times, sim.Policy.of(name), 8, CHAIN, coming, records.extend)
        assert len(records) == 24 and all(record.chunks[0][1] == 1 for record in records), "the first token comes alone"
        assert all(record.arrived < record.chunks[0][0] and sim.pauses(record)[0] > 0 for record in records)
        records.clear()
    turns, mixed = found.values()
    assert not turns["steps"]["mixed"] and mixed["steps"]["mixed"] > 20 and mixed["steps"]["chunk"] < turns["steps"]["chunk"]
    assert all(0 < each["busy"] < 1.01 for each in found.values())
    assert mixed["pause_ms"]["p99"] < turns["pause_ms"]["p99"]
    assert load or mixed["tok_s"] > 1.02 * turns["tok_s"]


def test_a_mixed_pass_that_saves_nothing_serves_no_more(part) -> None:
    """Keeps out: a simulation in which mixed passes win whatever they take."""
    sim = part("mixed_load")
    times, coming = sim.StepTimes(made_up(0.0)), sim.arrivals(24, None, 1)
    turns, mixed = (sim.simulate(times, sim.Policy.of(f"{kind}:1024"), 8, CHAIN, coming) for kind in ("turns", "mixed"))
    assert 0.9 < mixed["tok_s"] / turns["tok_s"] < 1.02


def test_gains_are_beside_policies_that_serve_as_much(part) -> None:
    """Keeps out: shorter pauses that are bought with tokens a second and called a gain."""
    sim = part("mixed_load")
    lines = [
        {"policy": name, "load": load, "tok_s": tok_s, **{key: {"p99": p99} for key in
         ("between_tokens_ms", "pause_ms", "first_token_ms")}}
        for name, tok_s, p99 in (("turns:2048", 100, 50), ("turns:512", 80, 20), ("mixed:1024", 99, 25), ("mixed:256", 85, 10))
        for load in (None, 0.5)
    ]  # fmt: skip
    assert [(gain["than"], gain["policy"], gain["ratios"][0]["between_p99"]) for gain in sim.gains(lines)] == [
        ("turns:2048", "mixed:1024", 0.5),
        ("turns:512", "mixed:256", 0.5),
    ]


def test_the_simulation_reads_what_is_measured(part) -> None:
    """Keeps out: a file of times that the simulation can't read."""
    times, sim = part("mixed_times"), part("mixed_load")
    found = json.loads(json.dumps(times.measured(times.tiny_decoder, CHAIN, times.TINY)))
    lines = list(sim.of_batch(sim.StepTimes(found), CHAIN, 2, ["turns:2048", "mixed:512"], 2))
    assert [(line["load"], line["policy"]) for line in lines[:3]] == [
        (None, "turns:2048"),
        (None, "mixed:512"),
        (0.5, "turns:2048"),
    ]
    assert len(lines) == 2 * (1 + len(sim.LOADS)) and all(line["tok_s"] > 0 for line in lines)
