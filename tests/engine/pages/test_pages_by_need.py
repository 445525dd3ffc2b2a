"""Rows get pages as they grow, and step back for older ones: random traffic in pools that hold few requests, without a device.

Keeps out: a round that writes where its row has no page, though the host knows its length a launch late; a text that loses or
doubles a token as its row steps back; an old row that steps back for a young one; a row that steps back for ever; pages, rows
and copies that nobody gives back.
"""

import random
from collections.abc import Iterator
from functools import partial

import pytest
from toolkit.driver import new_request
from toolkit.inside.memory import CHUNK, SPEC, Memory, balanced, drive
from toolkit.pages import ring_passes_take

from specdec.attention.kinds import LayerKind
from specdec.engine.chunks import ChunkBudget
from specdec.engine.launches.mixing import Mixing
from specdec.engine.launches.rows import BatchRows
from specdec.engine.loop import Engine
from specdec.engine.pages.admission import Admission
from specdec.engine.pages.forecast import OutputLengths, RowForecast, most_growth
from specdec.engine.pages.groups import page_groups
from specdec.engine.pages.pool import PagePool
from specdec.engine.request import Request, RequestState
from specdec.engine.scheduler import Scheduler
from specdec.engine.speculation import Speculation

ROWS, VOCAB = 4, 3
WINDOW = LayerKind(window=9)


class Watched(Scheduler):
    """Asserts that the youngest row steps back, and never the oldest request of all."""

    def _step_back(self, state: RequestState) -> None:
        assert state.arrival == max(other.arrival for other in self.states)
        assert len(self.states) > 1
        super()._step_back(state)


def engine_of(rng: random.Random, kinds: list[LayerKind], caching: bool, tokens: int) -> Engine[Memory]:
    """tokens: what the pool of the layers that read all keys holds, or that of the only group's rings."""
    page_size = rng.choice([1, 2, 4])
    groups = page_groups([kind.span for kind in kinds], SPEC.lookahead, page_size, 10**6, caching)
    pools = [PagePool(max(tokens // page_size, 2 * (group.ring or 0)) + 1, page_size, group.ring) for group in groups]
    if len(pools) == 2:
        ring = groups[1].ring
        assert ring is not None and groups[1].span is not None
        pools[1] = PagePool(ROWS * ring + 1, page_size, ring)
        admission = Admission(pools[0], SPEC.lookahead, caching, pools[1], groups[1].span)
    else:
        admission = Admission(pools[0], SPEC.lookahead, caching)
    admission.min_shared_to_wait = 8
    budget = ChunkBudget(40, 60, 80, most=CHUNK)
    mixing = Mixing(20) if rng.random() < 0.3 else None
    scheduler = Watched(admission, budget, Speculation((SPEC,)), ROWS, pads_rows=False, mixing=mixing)
    memory = Memory([LayerKind(), WINDOW] if len(pools) == 2 else kinds[:1], page_size, rng, VOCAB)
    memory.scheduler = scheduler
    return Engine(scheduler, memory, depth=rng.choice([0, 1, 1, 2]))


def arrivals(rng: random.Random, admission: Admission, count: int) -> Iterator[Request]:
    """Requests at the edge: some fill the pool alone, and many begin alike."""
    most = admission.longest_text(140)
    stems = [[rng.randrange(VOCAB) for _ in range(most)] for _ in range(2)]
    for _ in range(count):
        prompt = rng.choice(stems)[: rng.randrange(most // 2)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 6))]
        left = most - len(prompt)
        yield new_request(prompt, rng.choice([1, left, left, rng.randint(1, left)]), speculate=rng.random() < 0.8)


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("kinds", [[LayerKind()], [LayerKind(), WINDOW], [WINDOW]], ids=["all keys", "two groups", "a ring"])
def test_random_traffic_in_a_tiny_pool(kinds: list[LayerKind], caching: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ring_passes_take(CHUNK, monkeypatch)
    rng, stepped_back, resumed, ended = random.Random(f"{len(kinds)} {caching}"), 0, 0, 0
    for _ in range(5):
        engine = engine_of(rng, kinds, caching, tokens=rng.randint(60, 160))
        scheduler, memory = engine.scheduler, engine.runner
        if rng.random() < 0.7:  # everybody expects to end soon, so that many enter and step back
            scheduler.admission.lengths.rest = lambda written, most, number: 1  # type: ignore[method-assign]
        requests = drive(engine, arrivals(rng, scheduler.admission, 25), rng, partial(balanced, engine))
        totals = engine.totals()
        assert totals.pages_used == totals.local_pages_used == 0
        stepped_back, resumed, ended = stepped_back + totals.stepped_back, resumed + memory.resumed, ended + len(requests)
    assert ended == 5 * 25 and (stepped_back > 20 or kinds == [WINDOW] and not caching)
    assert resumed > 4 or not caching


class Interrupted(BatchRows):
    """Is interrupted the first time that it takes a row away."""

    was_interrupted = False

    def remove(self, state: RequestState) -> None:
        if not self.was_interrupted:
            self.was_interrupted = True
            raise KeyboardInterrupt
        super().remove(state)


def test_an_interrupt_while_a_row_steps_back() -> None:
    """Keeps out: a request that ends twice, and one that is awaited for ever, since it still counts as stepped back."""
    engine = engine_of(random.Random(0), [LayerKind()], caching=False, tokens=80)
    scheduler, ended, engine.depth = engine.scheduler, list[Request](), 1
    scheduler.admission.lengths.rest = lambda written, most, number: 1  # type: ignore[method-assign]
    scheduler.on_end = ended.append
    requests = [new_request([1] * 9, scheduler.admission.longest_text(140) - 9) for _ in range(3)]
    engine.submit(requests)
    scheduler.batch = Interrupted(ROWS)
    with pytest.raises(KeyboardInterrupt):
        while True:
            engine.step()
    assert scheduler.totals.stepped_back == 1 and len(ended) == len(set(ended)) >= 2
    assert not scheduler.awaits_tokens and not engine.stepped_back
    while not engine.is_idle:
        engine.step()
    balanced(engine)
    assert sorted(map(id, ended)) == sorted(map(id, requests)) and not scheduler.admission.allocations


# ---- what is foreseen ----


def test_growth_is_foreseen_as_rows_grow() -> None:
    """Brute force over time.  Keeps out: rows that wait although all would fit, and pages that are counted twice."""
    rng = random.Random(0)
    for _ in range(500):
        rests = [rng.randrange(9) for _ in range(rng.randint(1, 6))]
        rows = [RowForecast(rest, rng.randint(0, min(rest, 2)), rng.randrange(9)) for rest in rests]
        held = [  # at each time, more than now: before anybody of that rest ends
            sum(time - row.ahead if row.rest >= time else -row.freed for row in rows) for time in {row.rest for row in rows}
        ]
        assert most_growth(rows) == max(0, *held)
        assert most_growth(rows) <= sum(row.rest - row.ahead for row in rows), "never more than all together can need"


def test_lengths_are_expected_as_they_were_measured() -> None:
    """Keeps out: one long output after which nobody enters, and a forecast beyond max_tokens."""
    lengths, rng = OutputLengths(), random.Random(1)
    assert lengths.rest(0, 10_000, 1) == 256 and lengths.rest(1000, 10_000, 1) == 1000 and lengths.rest(5, 7, 1) == 7
    measured = [rng.randint(1, 500) for _ in range(1000)]
    for length in measured:
        lengths.add(length)
    last = sorted(measured[-256:])
    for written in (0, 100, 400):
        longer = [length - written for length in last if length > written]
        mean = sum(lengths.rest(written, 10_000, number) for number in range(1000)) / 1000
        assert mean == pytest.approx((sum(longer) + 4 * max(256, written)) / (len(longer) + 4), rel=0.05)
    assert lengths.rest(0, 3, 5) <= 3
