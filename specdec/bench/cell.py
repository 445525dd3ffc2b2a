"""Measures one cell: a decoder with one batch size and one tree shape, against itself without the draft.

Speed is timed as users get it.  Phases are timed in a pass of their own, because waiting for each of them would slow the
numbers that matter.  Knows no files and prints nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence

import torch

from specdec.bench.encode import with_seeds
from specdec.bench.measurement import Cell, Divergence, MemoryUse, Outputs, Phases, PlainCell, SideResult, repeat_ratio
from specdec.bench.warm_up import Laps, warm_up
from specdec.config import SamplingParams
from specdec.generation import Generation, Stats
from specdec.lossless.near_tie import explain_divergence, first_divergence
from specdec.models.schemes.parameters import LosslessParameters
from specdec.session import Session

MAX_COLD = 5  # passes of a side that are repeated because they prepared something; a short run captures late what a long run
# captured long before its end
Difference = tuple[int, tuple[int, ...], tuple[int, ...]]  # a prompt, the baseline's output, the other up to where they part
Explained = dict[Difference, Divergence]
MIN_PHASED = 2  # prompts of the pass that times phases, or as many as a batch holds


def measure_cell(
    session: Session,
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    repeats: int,
    on_pass: Callable[[str, int], None] = lambda *_: None,
    laps: Laps | None = None,
    explained: Explained | None = None,
) -> Cell:
    """Runs both sides on one decoder: a warm-up, the timed repeats, and a pass that times the phases.

    laps: that of the session, which has begun; None: a new one.  explained: differences that other cells of this pair, with
    these prompts, have looked at; gets those of this one.  Where acceptance is forced, the sides' outputs are not compared.
    """
    params = with_seeds(sampling, len(prompts))
    baseline, speculative = _run_sides(session, prompts, params, (False, True), repeats, on_pass, laps or Laps())
    outputs = _compare(session, prompts, params, baseline.passes, speculative.passes, {} if explained is None else explained)
    baseline.laps.lap("comparing")
    spec = session.settings.spec
    assert spec is not None
    return Cell(
        session.settings.options.max_batch_size,
        spec.numbers,
        baseline.side(),
        speculative.side(),
        outputs,
        repeat_ratio([output.token_ids for output in baseline.passes[0]]),
        baseline.memory,
        baseline.reasons,
        baseline.laps.seconds,
    )


def measure_plain(
    session: Session,
    prompts: Sequence[list[int]],
    sampling: SamplingParams,
    repeats: int,
    on_pass: Callable[[str, int], None] = lambda *_: None,
    laps: Laps | None = None,
) -> PlainCell:
    """The passes of `measure_cell` for a target without a draft, which has only plain decoding."""
    params = with_seeds(sampling, len(prompts))
    (run,) = _run_sides(session, prompts, params, (False,), repeats, on_pass, laps or Laps())
    ratio = repeat_ratio([output.token_ids for output in run.passes[0]])
    empty = _empty_prompts(session, run.passes)
    return PlainCell(session.settings.options.max_batch_size, run.side(), empty, ratio, run.memory, run.laps.seconds)


def _run_sides(
    session: Session,
    prompts: Sequence[list[int]],
    params: list[SamplingParams],
    speculates: tuple[bool, ...],
    repeats: int,
    on_pass: Callable[[str, int], None],
    laps: Laps,
) -> list[_SideRun]:
    """All passes of each side."""
    sides = [_SideRun(session, list(prompts), params, speculate, laps) for speculate in speculates]
    on_pass("warm-up", 0)
    warm_up(session, prompts, params, speculates, laps)
    done = len(sides)

    def run(what: str, order: list[_SideRun], work: Callable[[_SideRun], None]) -> None:
        nonlocal done
        for side in order:
            on_pass(f"{what} ({'speculative' if side.speculate else 'baseline'})", done)
            work(side)
            done += 1

    for repeat in range(repeats):  # in alternating order, so that a machine that slows down hits both sides
        run(f"repeat {repeat + 1} of {repeats}", sides if repeat % 2 == 0 else sides[::-1], _SideRun.time)
    for side in sides:  # before phases get graphs of their own
        side.memory, side.reasons = _memory(session), session.reasons
    run("phases", sides, _SideRun.time_phases)
    return sides


class _SideRun:
    """One side's passes.  `passes` keeps the outputs of those that were measured, to be compared later."""

    memory: MemoryUse
    reasons: list[str]

    def __init__(
        self, session: Session, prompts: list[list[int]], params: list[SamplingParams], speculate: bool, laps: Laps
    ) -> None:
        self.session, self.prompts, self.params, self.speculate, self.laps = session, prompts, params, speculate, laps
        self.passes: list[list[Generation]] = []
        self.seconds: list[float] = []
        self.rounds: list[int] = []
        self.timed: list[list[Generation]] = []
        self.cold = 0  # passes that had to prepare something
        self.cold_timed = 0  # those of them that count nevertheless
        self.phases: Phases | None = None

    def time(self) -> None:
        """Times one pass.  One that compiles or captures something is repeated, as long as there is hope."""
        while True:
            before, rounds = self.session.readiness, self.session.rounds_run
            seconds, outputs = self._run(self.prompts)
            is_cold = self.session.readiness != before
            if not is_cold or self.cold == MAX_COLD:
                break
            self.cold += 1
            self.laps.lap("warm-up")
        self.cold_timed += is_cold
        self.laps.lap("timed")
        self.seconds.append(seconds)
        self.rounds.append(self.session.rounds_run - rounds)
        self.timed.append(outputs)
        self.passes.append(outputs)

    def time_phases(self) -> None:
        """Waits for every phase, over the first prompts."""
        prompts = self.prompts[: max(MIN_PHASED, self.session.settings.options.max_batch_size)]
        with self.session.timed_phases() as phases:
            if self.session.settings.cuda_graphs == "round":  # phases get graphs of their own now
                self.session.capture_rounds(self.prompts, self.params[0])
            for _ in range(2):  # the first one may capture something: the shapes that "auto" chooses, a chunk of other prompts
                before = self.session.readiness
                phases.clear()
                wall, outputs = self._run(prompts)
                if self.session.readiness == before:
                    break
        self.passes.append(outputs)
        share = sum(map(len, prompts)) / sum(map(len, self.prompts))
        self.phases = Phases(wall, dict(phases.seconds), dict(phases.calls), share)
        self.laps.lap("phases")

    def side(self) -> SideResult:
        assert self.phases is not None
        requests = [output.stats for outputs in self.timed for output in outputs]
        tokens = [sum(len(output.token_ids) for output in outputs) for outputs in self.timed]
        lengths = [stats.accept_length for stats in requests if stats.rounds]
        mean = sum(lengths) / len(lengths) if lengths else 0.0
        return SideResult(
            self.seconds, tokens, Stats.total(requests), self.phases, self.rounds, mean, self.cold, self.cold_timed
        )

    def _run(self, prompts: list[list[int]]) -> tuple[float, list[Generation]]:
        """These prompts, the first ones, once.  Returns the wall seconds that they took, too."""
        device = self.session.settings.device
        _wait(device)
        start = time.perf_counter()
        outputs = self.session.generate(prompts, self.params[: len(prompts)], speculate=self.speculate)
        _wait(device)
        return time.perf_counter() - start, outputs


def _compare(
    session: Session,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    baseline: list[list[Generation]],
    speculative: list[list[Generation]],
    found: Explained,
) -> Outputs:
    """Every pass of one side against the same pass of the other.  A difference seen in several passes is explained once.

    found: what has been explained; it takes two passes of the target, in a wider dtype too.
    """
    if session.forces_acceptance:  # the speculative text is nobody's, but the baseline's is the target's own
        return Outputs(len(prompts), len(baseline), [], is_synthetic=True, empty=_empty_prompts(session, baseline))
    differing = dict[Difference, Divergence]()
    for plain, fast in zip(baseline, speculative, strict=True):
        for i, (a, b) in enumerate(zip(plain, fast, strict=True)):
            index = first_divergence(a.token_ids, b.token_ids)
            if index is None:
                continue
            told = tuple(b.token_ids[: index + 1])
            seen, key = (i, tuple(a.token_ids[: index + 1]), told), (i, tuple(a.token_ids), told)
            if seen not in differing and key not in found:
                part = explain_divergence(session, i, prompts[i], a.token_ids, b.token_ids, params[i])
                assert part is not None
                found[key] = part
            if seen not in differing:
                differing[seen] = found[key]
    empty = _empty_prompts(session, [*baseline, *speculative])
    return Outputs(len(prompts), len(baseline), list(differing.values()), empty=empty)


def _empty_prompts(session: Session, passes: Iterable[list[Generation]]) -> list[int]:
    """Numbers of the prompts for which some pass wrote nothing: two empty outputs are equal, and prove nothing."""
    return sorted({i for outputs in passes for i, output in enumerate(outputs) if _is_empty(output, session.writes_text)})


def _is_empty(output: Generation, has_text: bool) -> bool:
    """Whether the output has no text, or where nothing has text, no token before the one that ended it."""
    return not output.text if has_text else len(output.token_ids) == (output.finish_reason != "length")


def _memory(session: Session) -> MemoryUse:
    modules = [session.model] + ([session.head] if session.head is not None else [])
    tensors = {t.data_ptr(): t for module in modules for t in module.parameters()}  # shared ones once
    lossless = {id(part): part for module in modules for part in module.modules() if isinstance(part, LosslessParameters)}
    weights = sum(t.numel() * t.element_size() for t in tensors.values()) + sum(p.weight.num_bytes for p in lossless.values())
    pool, device = session.kv_pool_bytes, session.settings.device
    if device.type == "cuda":
        return MemoryUse(weights, pool, torch.cuda.max_memory_allocated(device), "GPU allocator, this row")
    import resource  # not there on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return MemoryUse(weights, pool, peak, "whole process so far")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
