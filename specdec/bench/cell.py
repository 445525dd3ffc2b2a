"""Measures one cell: a decoder with one batch size and one tree shape, against itself without the draft.

Speed is timed as users get it.  Phases are timed in a pass of their own, because waiting for each of them would slow the
numbers that matter.  Knows no files and prints nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from specdec.bench.measurement import Cell, Divergence, Memory, Outputs, Phases, PlainCell, Side, repeat_ratio
from specdec.bench.session import Session
from specdec.config import SamplingParams
from specdec.generation import Generation, Stats
from specdec.lossless.near_tie import explain_divergence, first_divergence
from specdec.models.schemes.planes import PackedPlanes

WARM_UPS = 6  # at most; a graph that a short run captures late, a long run captured long before its end
CHUNK_USES = 3  # a chunk of prompts is captured at its third use, so that with graphs fewer warm-ups say nothing


def measure_cell(
    session: Session,
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    repeats: int,
    on_pass: Callable[[str, int], None] = lambda *_: None,
) -> Cell:
    """Runs both sides on one decoder: warm-up passes until no more graphs are captured, the timed repeats, and a pass that
    times the phases.

    Where acceptance is forced, the two sides' outputs are not compared.
    """
    params = _with_seeds(sampling, len(prompts))
    sides = {speculate: _SideRun(session, list(prompts), params, speculate) for speculate in (False, True)}
    done = 0

    def both(what: str, order: tuple[bool, bool], run: Callable[[_SideRun], None]) -> None:
        nonlocal done
        for speculate in order:
            on_pass(what + (" (speculative)" if speculate else " (baseline)"), done)
            run(sides[speculate])
            done += 1

    least = CHUNK_USES if session.settings.cuda_graphs else 1
    for warm_up in range(WARM_UPS):
        graphs, done = session.num_graphs, 0
        both("warm-up" + (f" {warm_up + 1}" if warm_up else ""), (False, True), _SideRun.warm_up)
        session.make_ready()
        if warm_up + 1 >= least and session.num_graphs == graphs:
            break
    for repeat in range(repeats):  # in alternating order, so that a machine that slows down hits both sides
        both(f"repeat {repeat + 1} of {repeats}", (False, True) if repeat % 2 == 0 else (True, False), _SideRun.time)
    memory, reasons = _memory(session), session.reasons  # before phases get graphs of their own
    both("phases", (False, True), _SideRun.time_phases)
    baseline, speculative = sides[False], sides[True]
    spec = session.settings.spec
    assert spec is not None
    return Cell(
        session.settings.options.max_batch_size,
        (spec.num_steps, spec.topk, spec.num_draft_tokens),
        baseline.side(),
        speculative.side(),
        _compare(session, prompts, params, baseline.passes, speculative.passes),
        repeat_ratio([output.token_ids for output in baseline.passes[0]]),
        memory,
        reasons,
    )


def measure_plain(
    session: Session,
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    repeats: int,
    on_pass: Callable[[str, int], None] = lambda *_: None,
) -> PlainCell:
    """The passes of `measure_cell` for a target without a draft, which has only plain decoding."""
    run = _SideRun(session, list(prompts), _with_seeds(sampling, len(prompts)), speculate=False)
    least = CHUNK_USES if session.settings.cuda_graphs else 1
    for warm_up in range(WARM_UPS):
        graphs = session.num_graphs
        on_pass(f"warm-up {warm_up + 1}", 0)
        run.warm_up()
        if warm_up + 1 >= least and session.num_graphs == graphs:
            break
    for repeat in range(repeats):
        on_pass(f"repeat {repeat + 1} of {repeats}", repeat + 1)
        run.time()
    memory = _memory(session)  # before phases get graphs of their own
    on_pass("phases", repeats + 1)
    run.time_phases()
    ratio = repeat_ratio([output.token_ids for output in run.passes[0]])
    return PlainCell(session.settings.options.max_batch_size, run.side(), _empty_prompts(session, run.passes), ratio, memory)


def _with_seeds(sampling: SamplingParams, count: int) -> list[SamplingParams]:
    """The sampling of each prompt: prompt i has the seed + i."""
    return [sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + i) for i in range(count)]


class _SideRun:
    """One side's passes.  Each pass keeps its outputs, to be compared later."""

    def __init__(self, session: Session, prompts: list[list[int]], params: list[SamplingParams], speculate: bool) -> None:
        self.session, self.prompts, self.params, self.speculate = session, prompts, params, speculate
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
        with self.session.timed_phases() as phases:
            if self.session.settings.cuda_graphs == "round":  # phases get graphs of their own now
                self._run()
            phases.clear()
            wall = self._run()
        self.phases = Phases(wall, dict(phases.seconds), dict(phases.calls))

    def side(self) -> Side:
        assert self.phases is not None
        stats = Stats.total([output.stats for outputs in self.timed for output in outputs])
        tokens = [sum(len(output.token_ids) for output in outputs) for outputs in self.timed]
        return Side(self.seconds, tokens, stats, self.phases)

    def _run(self) -> float:
        """All prompts once.  Returns the wall seconds that they took."""
        device = self.session.settings.device
        _wait(device)
        start = time.perf_counter()
        outputs = self.session.generate(self.prompts, self.params, speculate=self.speculate)
        _wait(device)
        seconds = time.perf_counter() - start
        self.passes.append(outputs)
        return seconds


def _compare(
    session: Session,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    baseline: list[list[Generation]],
    speculative: list[list[Generation]],
) -> Outputs:
    """Every pass of one side against the same pass of the other.  A difference seen in several passes is explained once."""
    if session.forces_acceptance:  # the speculative text is nobody's, but the baseline's is the target's own
        return Outputs(len(prompts), len(baseline), [], is_synthetic=True, empty=_empty_prompts(session, baseline))
    found: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], Divergence] = {}
    for plain, fast in zip(baseline, speculative, strict=True):
        for i, (a, b) in enumerate(zip(plain, fast, strict=True)):
            index = first_divergence(a.token_ids, b.token_ids)
            if index is None:
                continue
            key = i, index, tuple(a.token_ids[index : index + 1]), tuple(b.token_ids[index : index + 1])
            if key not in found:
                part = explain_divergence(session, i, prompts[i], a.token_ids, b.token_ids, params[i])
                assert part is not None
                found[key] = part
    empty = _empty_prompts(session, [*baseline, *speculative])
    return Outputs(len(prompts), len(baseline), list(found.values()), empty=empty)


def _empty_prompts(session: Session, passes: Iterable[list[Generation]]) -> list[int]:
    """Numbers of the prompts for which some pass wrote nothing: two empty outputs are equal, and prove nothing."""
    return sorted({i for outputs in passes for i, output in enumerate(outputs) if _is_empty(output, session.writes_text)})


def _is_empty(output: Generation, has_text: bool) -> bool:
    """Whether the output has no text, or where nothing has text, no token before the one that ended it."""
    return not output.text if has_text else len(output.token_ids) == (output.finish_reason != "length")


def _memory(session: Session) -> Memory:
    modules = [session.model] + ([session.head] if session.head is not None else [])
    tensors = {t.data_ptr(): t for module in modules for t in module.parameters()}  # shared ones once
    planes = {id(part): part for module in modules for part in module.modules() if isinstance(part, PackedPlanes)}
    weights = sum(t.numel() * t.element_size() for t in tensors.values()) + sum(p.weight.num_bytes for p in planes.values())
    pool, device = session.kv_pool_bytes, session.settings.device
    if device.type == "cuda":
        return Memory(weights, pool, torch.cuda.max_memory_allocated(device), "GPU allocator, this row")
    import resource  # not there on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Memory(weights, pool, peak, "whole process so far")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
