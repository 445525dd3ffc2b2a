"""The scheduler with a runner that has no device: whatever requests do, the steps are in order and complete.

Like a rank, this runner knows only what steps say: the owner of each row, how far its prompt has run, and its pages.
"""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from toolkit.driver import new_request
from toolkit.inside.rows_only import RowsOnly, Written

from specdec import SamplingParams, SpecConfig
from specdec.engine.chunks import ChunkBudget
from specdec.engine.launches.mixing import Mixing
from specdec.engine.loop import Engine
from specdec.engine.pages.admission import Admission
from specdec.engine.pages.pool import PagePool
from specdec.engine.request import Request
from specdec.engine.scheduler import Scheduler
from specdec.engine.speculation import Speculation
from specdec.generation import Emitted
from specdec.steps import (
    Needs,
    PromptPart,
    RunChunk,
    RunMixed,
    RunRound,
    Step,
    StopDrafting,
)

CHAIN = SpecConfig(3, 1, 4)


class Keeping(Admission):
    """Notes of each text that has ended: how many tokens' pages are kept, whether as drafted ones, its `reach` and length."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.kept = list[tuple[int, bool, int, int]]()

    def keep(self, request: Request, tokens: Sequence[int], drafted: bool, reach: int, leaves: bool = False) -> None:
        if request.is_done:
            self.kept.append((len(tokens), drafted, reach, len(request.prompt_ids) + len(request.output.token_ids)))
        super().keep(request, tokens, drafted, reach, leaves)


def engine_of(
    rows: int, budget: ChunkBudget, depth: int = 1, pages: int = 200, pads_rows: bool = False, least: int = 0
) -> Engine[RowsOnly]:
    """least: see Mixing; 0: chunks and rounds take turns."""
    admission = Keeping(PagePool(pages, 4), CHAIN.lookahead, prefix_caching=False)
    mixing = Mixing(least) if least else None
    scheduler = Scheduler(admission, budget, Speculation((CHAIN,)), rows, pads_rows, mixing=mixing)
    return Engine(scheduler, RowsOnly(rows, random.Random(0)), depth)


def arrivals(rng: random.Random, count: int) -> Iterator[Request]:
    for _ in range(count):
        yield new_request([rng.randrange(40) for _ in range(rng.choice([1, 3, 9, 40, 90]))], rng.choice([1, 2, 7, 20]))


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("pads_rows", [False, True])
@pytest.mark.parametrize(("beside", "least"), [(1, 0), (7, 0), (64, 0), (7, 3), (64, 30)])
def test_random_traffic_is_served_whole(beside: int, least: int, pads_rows: bool, depth: int) -> None:
    """Keeps out: a row entered before it was cleared, a part of a prompt run twice or left out, a page with two owners, a
    request that waits for ever, a result that is read twice."""
    rng = random.Random(beside)
    engine = engine_of(5, ChunkBudget(beside, 2 * beside, 4 * beside), depth, pads_rows=pads_rows, least=least)
    requests, coming = [], arrivals(rng, 120)
    more = True
    while more or not engine.is_idle:
        for request in [next(coming, None) for _ in range(rng.randrange(4))]:
            more = more and request is not None
            if request is not None:
                requests.append(request)
                engine.submit([request])
        if rng.random() < 0.1 and (going := [request for request in requests if not request.is_done]):
            engine.cancel(rng.choice(going))
        engine.step()
    runner = engine.runner
    assert (sum(isinstance(step, RunMixed) for step in runner.steps) > 50) == (least > 0)
    assert not runner.entries and not runner.running and runner.clean == set(range(5))
    pool = engine.scheduler.admission.pool
    assert pool.num_free == pool.capacity
    cancelled = [request for request in requests if request.cancelled]
    assert len(requests) == 120 and 5 < len(cancelled) < 100
    for request in requests:
        if request.cancelled:
            continue
        assert request.output.token_ids == [7, *[8] * (request.sampling.max_tokens - 1)]
        request.stats.check_identity(len(request.output.token_ids))


def test_chunks_and_rounds_take_turns() -> None:
    """Keeps out: a long prompt whose chunks all run before the next round of rows that run already."""
    engine = engine_of(3, ChunkBudget(10, 30, 60))
    engine.submit([new_request([1, 2, 3], 50)])
    for _ in range(3):
        engine.step()
    engine.submit([new_request([5] * 95, 3)])
    first = len(engine.runner.steps)
    while not engine.scheduler.states[-1].runs or len(engine.scheduler.states) < 2:
        engine.step()
    kinds = [type(step) for step in engine.runner.steps[first:] if isinstance(step, RunChunk | RunRound)]
    assert kinds.count(RunChunk) == 10 and all(a != b for a, b in zip(kinds, kinds[1:], strict=False))
    chunks = [step for step in engine.runner.steps[first:] if isinstance(step, RunChunk)]
    assert all(chunk.cost <= 10 for chunk in chunks)


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    """Keeps out: prompts in the order of arrival, where one of 32,000 tokens holds up all short ones; and the long one
    starving under a stream of short ones."""
    engine = engine_of(8, ChunkBudget(16, 32, 64), pages=400)
    long = new_request([5] * 300, 2)
    engine.submit([long])
    engine.step()
    short = new_request([1] * 10, 2)
    engine.submit([short])
    engine.step()
    chunk = engine.runner.steps[-1]
    assert isinstance(chunk, RunChunk) and PromptPart(1, [1] * 10, 0, -1) in chunk.parts
    before = engine.scheduler.states[0].done
    chunks = 0
    while not long.output.token_ids and chunks < 200:
        if len(engine.scheduler.states) < 7:
            engine.submit([new_request([1] * 14, 1)])
        engine.step()
        chunks += 1
    assert long.output.token_ids and chunks <= 2 + 2 * (300 - before) // (16 // 4)


def test_whole_prompts_fill_a_chunk_and_parts_do_not() -> None:
    """Keeps out: eight short prompts in eight passes while nothing runs, and a pass of a long prompt alone that is so large
    that whoever comes next waits for it."""
    budget = ChunkBudget(beside_rounds=64, alone=256, whole_prompts=1024)
    engine = engine_of(8, budget, pages=4000)
    engine.submit([new_request([1] * 100, 1) for _ in range(8)])
    engine.step()
    assert len(engine.runner.steps[-1].parts) == 8  # type: ignore[union-attr]
    while not engine.is_idle:
        engine.step()
    engine.submit([new_request([1] * 2000, 1)])
    engine.step()
    assert sum(len(part.token_ids) for part in engine.runner.steps[-1].parts) == 256  # type: ignore[union-attr]


def test_graphs_are_captured_when_there_is_time() -> None:
    """Keeps out: rows that run and wait for a large chunk's graph to be captured."""
    engine = engine_of(4, ChunkBudget(64, 64, 64))
    engine.submit([new_request([1] * 60, 40)])
    engine.step()
    engine.submit([new_request([1] * 60, 40)])
    for _ in range(6):
        engine.step()
    engine.submit([new_request([1] * 12, 40)])
    for _ in range(6):
        engine.step()
    chunks = [step for step in engine.runner.steps if isinstance(step, RunChunk)]
    assert [chunk.may_capture for chunk in chunks] == [True, False, True]


def test_an_interrupt_leaves_every_row_padding() -> None:
    """Keeps out: Ctrl-C while rows are moved and cleared, after which a row that nobody holds goes on running."""
    engine = engine_of(4, ChunkBudget(64, 64, 64))
    requests = [new_request([1] * 5, 40) for _ in range(3)]
    engine.submit(requests)
    for _ in range(4):
        engine.step()
    run, calls = engine.runner.run, iter(range(100))

    def interrupted(step: Step) -> Written | None:
        if next(calls) == 0:
            raise KeyboardInterrupt
        return run(step)

    engine.runner.run = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        engine.cancel(requests[0])  # the last row is to take its place
    engine.runner.run = run  # type: ignore[method-assign]
    assert engine.runner.clean == set(range(4)) and not engine.runner.running
    assert all(request.is_done for request in requests)


def test_the_host_does_not_run_ahead_of_a_long_prompt() -> None:
    """Keeps out: all chunks of a long prompt launched at once, so that a short prompt that comes next waits for all of them."""
    engine = engine_of(2, ChunkBudget(8, 8, 8))
    engine.submit([new_request([5] * 200, 2)])
    launched: list[Emitted] = []
    run = engine.runner.run

    def spy(step: Step) -> Written | None:
        pending = run(step)
        launched.extend([pending] if pending is not None else [])
        return pending

    engine.runner.run = spy  # type: ignore[method-assign]
    for _ in range(12):
        engine.step()
        assert sum(not pending.is_over for pending in launched) <= 2
    assert len(launched) == 12


def test_the_oldest_prompt_keeps_its_share_when_rows_move() -> None:
    """Keeps out: the share of the prompt that waits longest given to whoever stands in the lowest row."""
    engine = engine_of(4, ChunkBudget(16, 16, 16), pages=900)
    engine.submit([new_request([1] * 4, 2)])
    engine.step()
    old, young = new_request([5] * 400, 2), new_request([6] * 300, 2)
    engine.submit([old])
    engine.submit([young])
    while engine.scheduler.states[0].request is not young:  # the first request ends, and the last row takes its place
        engine.step()
    engine.step()
    engine.step()
    chunk = [step for step in engine.runner.steps if isinstance(step, RunChunk)][-1]
    counts = {part.token_ids[0]: len(part.token_ids) for part in chunk.parts}
    assert counts == {5: 4, 6: 12}


def test_a_chunk_computes_what_prompts_that_end_need() -> None:
    """Keeps out: a chunk that sorts a vocabulary, and a graph of its own, for a prompt that gets its first token later."""
    engine = engine_of(2, ChunkBudget(16, 16, 16))
    engine.submit([new_request([5] * 60, SamplingParams(max_tokens=2, temperature=1.0, top_k=3)), new_request([6] * 4, 2)])
    while not engine.is_idle:
        engine.step()
    chunks = [step for step in engine.runner.steps if isinstance(step, RunChunk)]
    for chunk in chunks:
        ending = {part.token_ids[0] for part in chunk.parts if part.is_last}
        assert chunk.needs == Needs.of(*["sampled", "filtered"] * (5 in ending))
    assert len(chunks) > 2


def test_the_drafter_reads_chunks_in_which_any_prompt_speculates() -> None:
    """Keeps out: a prompt that the drafter does not know because one that needs no drafter came in the same chunk."""
    for speculates in ((True, False), (False, True), (False, False)):
        engine = engine_of(2, ChunkBudget(16, 16, 16))
        engine.submit([new_request([5] * 6, 2, speculate=each) for each in speculates])
        while not engine.is_idle:
            engine.step()
        chunks = [step for step in engine.runner.steps if isinstance(step, RunChunk)]
        assert [(len(chunk.parts), chunk.drafted) for chunk in chunks] == [(2, any(speculates))]


def test_pages_are_kept_as_launches_in_flight_leave_them() -> None:
    """Keeps out: a copy of a ring's page that was whole when its text ended, and that a round under way writes to."""
    engine = engine_of(1, ChunkBudget(16, 16, 16))
    engine.submit([new_request([5] * 10, 6), new_request([6] * 10, 6)])
    while not engine.is_idle:
        engine.step()
    kept = kept_by(engine)
    assert len(kept) == 2 and all(reach >= length + CHAIN.lookahead for *_, reach, length in kept)


def kept_by(engine: Engine[RowsOnly]) -> list[tuple[int, bool, int, int]]:
    assert isinstance(engine.scheduler.admission, Keeping)
    return engine.scheduler.admission.kept


@pytest.mark.parametrize("pause", [0, 3])
def test_the_drafter_knows_no_text_after_the_runner_ended_its_drafts(pause: int) -> None:
    """Keeps out: pages of tokens that the drafter passed over or has not caught up on, found later by a text that speculates;
    rounds that draft for nobody."""
    engine = engine_of(1, ChunkBudget(16, 16, 16))
    engine.runner.ends_at, rounds = 2, engine.runner.rounds
    engine.submit([new_request([5] * 10, 30)])
    while not engine.is_idle:
        engine.step()
        if len(rounds) == 2:
            engine.scheduler.speculation.pause = pause  # tokens that the drafter has not seen
    kinds = [kind for kind, _ in rounds]
    assert kinds[:3] == ["speculative"] * 3 and {*kinds[3:]} == {"plain"}, "the third was under way when the second was read"
    assert [kept[:2] for kept in kept_by(engine)] == [(10 + 1 + rounds[0][1] - pause, True)]


@pytest.mark.parametrize("pause", [0, 3])
def test_the_drafter_knows_no_text_after_it_was_stopped(pause: int) -> None:
    """Keeps out: pages beyond the length at which drafting stops, or that the drafter has not caught up on, kept as drafted."""
    engine, stopped = engine_of(1, ChunkBudget(16, 16, 16)), list[int]()
    engine.scheduler.speculation.max_draft_length = 20
    request = new_request([5] * 10, 30)
    engine.submit([request])
    while not engine.is_idle:
        before = len(request.prompt_ids + request.output.token_ids)
        engine.scheduler.speculation.pause = 0 if stopped else pause
        seen = len(engine.runner.steps)
        engine.step()
        stopped += [before for step in engine.runner.steps[seen:] if isinstance(step, StopDrafting)]
    assert len(stopped) == 1 and stopped[0] >= 20
    assert [kept[:2] for kept in kept_by(engine)] == [(stopped[0] - pause, True)]


def test_nobody_waits_for_another_prompts_pages_but_who_shares_them() -> None:
    """Keeps out: with prefix caching, a short prompt that waits for all chunks of a long one since a prompt between the two
    shares pages with the long one; and that prompt waiting for more than the pages that it shares."""
    admission = Admission(PagePool(3000, 4), CHAIN.lookahead, prefix_caching=True)
    budget = ChunkBudget(64, 64, 64)
    engine = Engine(Scheduler(admission, budget, Speculation((CHAIN,)), 4, False), RowsOnly(4, random.Random(0), True), 0)
    long = [i % 37 for i in range(4000)]
    requests = [new_request(long, 2), new_request(long[:400] + [38] * 8, 2), new_request([39] * 9, 2)]
    engine.submit(requests)
    chunks_until = {}
    while not engine.is_idle:
        engine.step()
        chunks = sum(isinstance(step, RunChunk) for step in engine.runner.steps)
        for index, request in enumerate(requests):
            if request.output.token_ids:
                chunks_until.setdefault(index, chunks)
    assert chunks_until[2] <= 2 and chunks_until[1] <= 2 + 400 // 48 + 2 and chunks_until[0] > 50
    assert requests[1].stats.cached_tokens >= 400 - 256


@pytest.mark.parametrize(("shape", "depths"), [((5, 4, 3), 2), ((5, 1, 6), 5), ((2, 4, 11), 2)], ids=str)
def test_a_tree_has_no_more_levels_than_drafted_nodes(shape: tuple[int, int, int], depths: int) -> None:
    """Keeps out: rows of counters for depths that no node can have."""
    assert RunRound(1, "speculative", SpecConfig(*shape), Needs.of()).depths == depths


def test_drafts_that_go_on_again_do_so_in_requests_that_waited() -> None:
    """Keeps out: a request without pages that is told of stopped drafts, though it begins after they go on again."""
    engine = engine_of(3, ChunkBudget(64, 64, 64), depth=0, pages=14)
    first, second = new_request([1] * 30, 4), new_request([2] * 30, 4)
    engine.submit([first, second])
    engine.scheduler.speculation.is_stopped = True
    engine.step()
    assert first.has_entered and not second.has_entered, "there are pages for one"
    engine.scheduler.speculation.is_stopped = False
    while not engine.is_idle:
        engine.step()
    assert first.drafted_until is not None and second.drafted_until is None
    assert not first.stats.drafted and second.stats.drafted
