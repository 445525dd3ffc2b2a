"""Measures one cell: a decoder with one batch size and one tree shape, against itself without the draft.

Speed is timed as users get it; phases are timed in a pass of their own, because waiting for each of them would slow the
numbers that matter.  Knows no files and prints nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from specdec.bench.measurement import Cell, Divergence, Memory, Outputs, Phases, Side, repeat_ratio
from specdec.bench.near_tie import explain_divergence, first_divergence
from specdec.bench.profile import timed_phases
from specdec.config import SamplingParams
from specdec.decoder import SpecDecoder
from specdec.generation import Generation, Stats
from specdec.build import kv_bytes_per_page

WARM_UPS = 4  # at most; what a short run captures late, a long one has captured long ago


def measure_cell(
    decoder: SpecDecoder,
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    repeats: int,
    on_pass: Callable[[str, int], None] = lambda *_: None,
) -> Cell:
    """Both sides on one decoder: warm-up passes until no more graphs come, the timed repeats, and a pass that times the phases.

    Where the decoder's acceptance is forced, outputs are not compared.
    """
    params = [sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + i) for i in range(len(prompts))]
    sides = {speculate: _SideRun(decoder, list(prompts), params, speculate) for speculate in (False, True)}
    done = 0

    def both(what: str, order: tuple[bool, bool], run: Callable[[_SideRun], None]) -> None:
        nonlocal done
        for speculate in order:
            on_pass(what + (" (speculative)" if speculate else " (baseline)"), done)
            run(sides[speculate])
            done += 1

    for warm_up in range(WARM_UPS):
        graphs, done = decoder.engine.num_graphs, 0
        both("warm-up" + (f" {warm_up + 1}" if warm_up else ""), (False, True), _SideRun.warm_up)
        if decoder.engine.num_graphs == graphs:
            break
    for repeat in range(repeats):  # alternating, so that a machine that slows down hits both
        both(f"repeat {repeat + 1} of {repeats}", (False, True) if repeat % 2 == 0 else (True, False), _SideRun.time)
    memory = _memory(decoder)  # before phases get graphs of their own
    both("phases", (False, True), _SideRun.time_phases)
    baseline, speculative = sides[False], sides[True]
    spec = decoder.settings.spec
    assert spec is not None
    return Cell(
        decoder.settings.max_batch_size,
        (spec.num_steps, spec.topk, spec.num_draft_tokens),
        baseline.side(),
        speculative.side(),
        _compare(decoder, prompts, params, baseline.passes, speculative.passes),
        repeat_ratio([output.token_ids for output in baseline.passes[0]]),
        memory,
    )


class _SideRun:
    """One side's passes.  Each pass keeps its outputs, to be compared later."""

    def __init__(self, decoder: SpecDecoder, prompts: list[list[int]], params: list[SamplingParams], speculate: bool) -> None:
        self.decoder, self.prompts, self.params, self.speculate = decoder, prompts, params, speculate
        self.passes: list[list[Generation]] = []
        self.seconds: list[float] = []
        self.timed: list[list[Generation]] = []
        self.phases: Phases | None = None

    def warm_up(self) -> None:
        self._run()

    def time(self) -> None:
        self.seconds.append(self._run())
        self.timed.append(self.passes[-1])

    def time_phases(self) -> None:
        with timed_phases(self.decoder.engine) as clock:
            if self.decoder.settings.cuda_graphs == "round":  # phases get graphs of their own now
                self._run()
            clock.clear()
            wall = self._run()
        self.phases = Phases(wall, dict(clock.seconds), dict(clock.calls))

    def side(self) -> Side:
        assert self.phases is not None
        stats = Stats.total([output.stats for outputs in self.timed for output in outputs])
        tokens = [sum(len(output.token_ids) for output in outputs) for outputs in self.timed]
        return Side(self.seconds, tokens, stats, self.phases)

    def _run(self) -> float:
        """All prompts once; wall seconds of it."""
        device = self.decoder.settings.device
        _wait(device)
        start = time.perf_counter()
        outputs = self.decoder.generate(self.prompts, self.params, speculate=self.speculate)
        _wait(device)
        seconds = time.perf_counter() - start
        self.passes.append(outputs)
        return seconds


def _compare(
    decoder: SpecDecoder,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    baseline: list[list[Generation]],
    speculative: list[list[Generation]],
) -> Outputs:
    """Every pass of one side against the same pass of the other; a difference seen in several passes is listed once."""
    if decoder.engine.verifier.synthetic is not None:
        return Outputs(len(prompts), len(baseline), [], is_synthetic=True)
    found: dict[tuple[int, int, int | None, int | None], Divergence] = {}
    for plain, fast in zip(baseline, speculative, strict=True):
        for i, (a, b) in enumerate(zip(plain, fast, strict=True)):
            if first_divergence(a.token_ids, b.token_ids) is not None:
                part = explain_divergence(decoder, i, prompts[i], a.token_ids, b.token_ids, params[i])
                assert part is not None
                found.setdefault((i, part.index, part.token_baseline, part.token_speculative), part)
    return Outputs(len(prompts), len(baseline), list(found.values()))


def _memory(decoder: SpecDecoder) -> Memory:
    modules = [decoder.model] + ([decoder.head] if decoder.head is not None else [])
    tensors = {t.data_ptr(): t for module in modules for t in module.parameters()}  # shared ones once
    weights = sum(t.numel() * t.element_size() for t in tensors.values())
    pool = decoder.engine.pool.num_pages * kv_bytes_per_page(decoder.model, decoder.head, decoder.settings)
    if decoder.settings.device.type == "cuda":
        return Memory(weights, pool, torch.cuda.max_memory_allocated(decoder.settings.device), "GPU allocator, this row")
    import resource  # not there on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Memory(weights, pool, peak, "whole process so far")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
