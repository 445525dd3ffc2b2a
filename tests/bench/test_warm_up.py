"""What the benchmark does before it measures: it warms up what is measured, once, and sees a pass that was not warm."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import pytest
from toolkit.bench import StubSession
from toolkit.driver import Driver
from toolkit.models import Zoo

from specdec import SamplingParams, SpecConfig
from specdec.bench.cell import MAX_COLD, Difference, Explained, measure_cell
from specdec.bench.warm_up import Laps
from specdec.generation import Generation
from specdec.lossless.near_tie import Divergence
from specdec.ops.compiling import rehearsal
from specdec.runner.prompts import PromptRunner
from specdec.runner.rounds import RoundRunner
from specdec.runner.runner import DeviceRunner
from specdec.session import Session
from specdec.steps import RunChunk, RunMixed, RunRound

SPEC = SpecConfig(2, 2, 4)
PROMPTS = [[1, 2, 3], [4, 5]]
GREEDY = SamplingParams(max_tokens=9)


class Preparing(StubSession):
    """Prepares something in each of so many passes of whole texts, and in each of so many over prompts alone."""

    def __init__(self, texts: int = 0, prompts: int = 0) -> None:
        super().__init__()
        self.left, self.lengths = {False: prompts, True: texts}, list[tuple[int, int]]()

    def generate(
        self, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams], *, speculate: bool
    ) -> list[Generation]:
        is_whole = sampling[0].max_tokens == GREEDY.max_tokens
        self.lengths.append((sampling[0].max_tokens, len(prompts)))
        if self.left[is_whole]:
            self.left[is_whole] -= 1
            self.readiness = (0, 0, self.readiness[2] + 1)
        return super().generate(prompts, sampling, speculate=speculate)


def test_a_pass_that_prepares_something_is_no_measurement() -> None:
    """Keeps out: a repeat that captures graphs or compiles kernels, and so measures that."""
    session = Preparing(texts=2)
    cell = measure_cell(session, PROMPTS, GREEDY, repeats=2)
    whole = [speculate for (speculate, timed), (most, _) in zip(session.calls, session.lengths) if most == 9 and not timed]
    assert whole == [False, False, False, True, True, False]
    assert len(cell.baseline.seconds) == len(cell.baseline.batch_rounds) == 2 and cell.baseline.batch_rounds == [5, 5]
    assert (cell.baseline.cold, cell.baseline.cold_timed, cell.speculative.cold) == (2, 0, 0)


def test_a_side_that_is_never_ready_says_so() -> None:
    """Keeps out: a benchmark that repeats for ever, and one that times compilations without a word."""
    session = Preparing(texts=99)
    cell = measure_cell(session, PROMPTS, GREEDY, repeats=2)
    for side in (cell.baseline, cell.speculative):
        assert (side.cold, side.cold_timed, len(side.seconds)) == (MAX_COLD, 2, 2)


def test_what_is_measured_is_warmed_up_once_and_not_as_whole_texts() -> None:
    """Keeps out: minutes of warm-up, since every prompt was written to its end three times and more on both sides; and chunks
    of prompts that are captured at their third use, so in a repeat."""
    session = Preparing(prompts=8)
    session.settings.cuda_graphs, session.settings.options = "round", replace(session.settings.options, max_batch_size=1)
    long = replace(GREEDY, max_tokens=100)
    measure_cell(session, [[1, 2, 3], [4, 5], [6], [7]], long, repeats=1)
    alone, short, whole, phases = (1, 4), (7, 1), (100, 4), (100, 2)
    assert session.lengths == [alone] * 6 + [short] * 2 + [whole] * 2 + [phases] * 2
    session = Preparing()
    session.settings.cuda_graphs = "round"
    measure_cell(session, PROMPTS, GREEDY, repeats=1)
    assert session.lengths[:2] == [(1, 2)] * 2, "prompts that prepare nothing run once"
    session = Preparing()
    session.settings.spec = SpecConfig("auto", 2, 6)
    measure_cell(session, PROMPTS, GREEDY, repeats=1)
    assert session.prepared == ["rehearsed", "captured", "auto"]
    assert [speculate for speculate, _ in session.calls[:5]] == [False, True, True, False, True], "auto learns from whole texts"


def test_phases_of_some_prompts_stand_for_all() -> None:
    """Keeps out: reading a quarter of the prompts shown as the time for all of them, and factors that mix both."""
    session = Preparing()
    session.settings.options = replace(session.settings.options, max_batch_size=1)
    cell = measure_cell(session, [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]], GREEDY, repeats=1)
    phases = cell.baseline.phases
    assert phases.share == 0.5 and phases.prefill_ms == pytest.approx(2)
    product = cell.predicted_speed_up
    for factor in cell.speed_up_factors:
        product *= factor
    assert product == pytest.approx(cell.speed_up)
    assert cell.speed_up_factors.uneven_ends == pytest.approx(5 / 2 / 3)


def test_a_difference_is_looked_at_once_for_all_cells() -> None:
    """Keeps out: seconds in a wider dtype for each shape, about a text that differs at the same place in each of them."""
    asked = list[int]()

    class Noting(Explained):
        def __setitem__(self, difference: Difference, part: Divergence) -> None:
            asked.append(difference[0])
            super().__setitem__(difference, part)

    explained = Noting()
    cells = [
        measure_cell(StubSession(wrong=wrong), PROMPTS, GREEDY, repeats=2, explained=explained)
        for wrong in ([5, 6, 1, 8, 5, 6], [5, 6, 1, 8, 5, 6], [5, 6, 2, 8, 5, 6])
    ]
    assert asked == [0, 1, 0, 1], "twice for the first cell, not for the second, and twice for another token"
    assert [len(cell.outputs.differing) for cell in cells] == [2, 2, 2]
    assert [part.token_speculative for cell in cells for part in cell.outputs.differing] == [1, 1, 1, 1, 2, 2]


def test_seconds_of_the_benchmark_add_up() -> None:
    """Keeps out: a benchmark that takes a minute and does not say for what."""
    ticks = iter(range(100))
    laps = Laps(lambda: next(ticks))
    cell = measure_cell(Preparing(texts=1), PROMPTS, GREEDY, repeats=2, laps=laps)
    assert sum(cell.bench_seconds.values()) == next(ticks) - 1
    assert cell.bench_seconds == {
        "compiling": 1, "prompts": 1, "capturing rounds": 1, "warm-up": 2, "timed": 4, "phases": 2, "comparing": 1
    }  # fmt: skip


@pytest.mark.parametrize("drafts", [True, False])
def test_steps_that_are_prepared_are_those_that_come(zoo: Zoo, drafts: bool) -> None:
    """Keeps out: kernels and graphs of rounds that never run, and those of others made while they are timed."""
    session = Session(zoo.decoder("llama", "eagle3" if drafts else None, SPEC if drafts else None, max_batch_size=4))
    driver, seen = Driver(session.decoder), list[Any]()
    driver.pad_rows()
    prompts, sampling = [[1, 2, 3], [4, 5, 6, 7], [8], [9, 10], [11, 12]], SamplingParams(max_tokens=9, ignore_eos=True)
    rounds, chunks = session.rounds_to_come(prompts, sampling), session.chunks_to_come(prompts, sampling)
    assert [step.rows for step in rounds] == [size for size in (1, 2, 4) for _ in range(1 + drafts)]
    driver.watch(seen.append)
    for number in range(1, 6):
        for speculate in (False, True)[: 1 + drafts]:
            session.generate(prompts[:number], [sampling] * number, speculate=speculate)
    assert {step for step in seen if isinstance(step, RunRound)} == set(rounds)
    sizes = {tuple(len(part.token_ids) for part in step.parts): step.needs for step in seen if isinstance(step, RunChunk)}
    assert [sizes.get(tuple(len(part.token_ids) for part in step.parts)) for step in chunks] == [step.needs for step in chunks]
    assert [len(step.parts) for step in chunks] == [1, 4] and all(step.drafted == drafts for step in chunks)
    assert session.rounds_run == sum(isinstance(step, RunRound) for step in seen)


@pytest.mark.parametrize("drafts", [True, False])
def test_captured_rounds_leave_texts_as_they_are(zoo: Zoo, drafts: bool) -> None:
    """Keeps out: rounds that are run on the side for their graphs, and advance lengths or tokens that a text reads."""
    session = Session(zoo.decoder("llama", "eagle3" if drafts else None, SPEC if drafts else None, max_batch_size=2))
    prompts, sampling = [[1, 2, 3], [4, 5]], [SamplingParams(max_tokens=9, ignore_eos=True)] * 2
    want = [output.token_ids for output in session.generate(prompts, sampling, speculate=drafts)]
    assert session.readiness == (0, 0, 0)
    session.decoder.settings = replace(session.settings, cuda_graphs="round")
    tried = list[Any]()
    Driver(session.decoder).watch(tried.append)
    session.capture_rounds(prompts, sampling[0])
    assert [step.step for step in tried] == session.rounds_to_come(prompts, sampling[0]) and tried
    assert [output.token_ids for output in session.generate(prompts, sampling, speculate=drafts)] == want


def test_kernels_are_rehearsed_once_for_all_cells(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a second of rehearsals in every cell, for kernels that the process has since the first one."""
    asked, known = list[int](), set[Any]()
    monkeypatch.setattr(DeviceRunner, "rehearse", lambda self, steps: asked.append(len(steps)))
    for size in (1, 2, 2):
        session = Session(zoo.decoder("llama", "eagle3", SPEC, max_batch_size=size), known)
        session.rehearse([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=9))
    assert len(asked) == 2 and all(asked)


def test_steps_to_come_are_rehearsed_and_change_nothing(zoo: Zoo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: kernels of rounds or of padded chunks that are compiled one by one while they are timed, and rehearsals that
    a text shows."""
    session = Session(zoo.decoder("llama", "eagle3", SPEC, max_batch_size=2))
    prompts, sampling = [[1, 2, 3], [4, 5]], SamplingParams(max_tokens=9, ignore_eos=True, repetition_penalty=1.2)
    want = [output.token_ids for output in session.generate(prompts, [sampling] * 2, speculate=True)]
    rehearsed, chunks, rounds, known = list[Any](), PromptRunner.rehearse, RoundRunner.rehearse, set[Any]()

    def chunk(self: PromptRunner, step: RunChunk, padded: bool = False) -> None:
        rehearsed.append((step, padded))
        with suppress(RuntimeError):
            chunks(self, step, padded)

    def one_round(self: RoundRunner, state: Any, step: RunRound) -> None:
        rehearsed.append(step)
        with suppress(RuntimeError):  # a CPU's attention needs values on the host
            rounds(self, state, step)

    monkeypatch.setattr(PromptRunner, "rehearse", chunk)
    monkeypatch.setattr(RoundRunner, "rehearse", one_round)
    monkeypatch.setattr(rehearsal, "_compilers", lambda pool: MagicMock())
    session.rehearse(prompts, sampling)
    assert not rehearsed, "not where passes may not be rehearsed"
    session = Session(session.decoder, known)
    Driver(session.decoder).may_rehearse()
    Driver(session.decoder).mix(1)
    session.rehearse(prompts, sampling)
    expected = session.rounds_to_come(prompts, sampling)
    chunks_to_come = session.chunks_to_come(prompts, sampling)
    padded_or_not = [(step, padded) for step in chunks_to_come for padded in (False, True)]
    assert rehearsed == [*expected, *padded_or_not]
    assert known == {*expected, *chunks_to_come, RunMixed(expected[-1], chunks_to_come[-1])}
    assert [output.token_ids for output in session.generate(prompts, [sampling] * 2, speculate=True)] == want
