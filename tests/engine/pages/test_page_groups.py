"""Two groups of layers in one model, without a device: whoever reads a position finds what belongs there.

Keeps out: a ring that overwrites a key which is still read, a page with two owners, a kept copy of a page that was
overwritten or never written, copies made in the wrong order, and pages that nobody gives back.
"""

import random

import pytest
from toolkit.driver import new_request
from toolkit.inside.memory import CHUNK, SPEC, Memory, balanced
from toolkit.pages import ring_passes_take

from specdec.attention.kinds import LayerKind
from specdec.engine.chunks import ChunkBudget
from specdec.engine.loop import Engine
from specdec.engine.pages.admission import Admission
from specdec.engine.pages.groups import page_groups
from specdec.engine.pages.pool import PagePool
from specdec.engine.request import Request
from specdec.engine.scheduler import Scheduler
from specdec.engine.speculation import Speculation

KINDS = [LayerKind(window=9), LayerKind(window=1), LayerKind(window=40), LayerKind(chunk=16)]


@pytest.mark.slow_cases
@pytest.mark.parametrize(  # any two of the three things meet
    ("kind", "page_size", "caching"),
    [(kind, page_size, (i + j) % 2 == 1) for i, kind in enumerate(KINDS) for j, page_size in enumerate((1, 4, 16))],
    ids=str,
)
def test_random_traffic_reads_its_own_text(
    kind: LayerKind, page_size: int, caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring_passes_take(CHUNK, monkeypatch)
    rng = random.Random(f"{kind} {page_size} {caching}")
    span = kind.span
    assert span is not None
    groups = page_groups([None, span], SPEC.lookahead, page_size, 10**6, caching)
    ring = groups[1].ring
    assert ring is not None and groups[1].span == span
    rows, vocab = 3, 3
    local = PagePool(rows * ring + 1 + rng.choice([40, 900]) // page_size, page_size, ring)

    admission = Admission(PagePool(1500 // page_size, page_size), SPEC.lookahead, caching, local, span)
    admission.min_shared_to_wait = 8
    budget = ChunkBudget(40, 60, 80, most=admission.max_chunk_tokens)
    scheduler = Scheduler(admission, budget, Speculation((SPEC,)), rows, pads_rows=False)
    memory = Memory([LayerKind(), kind], page_size, rng, vocab)
    memory.scheduler = scheduler
    engine = Engine(scheduler, memory, depth=rng.choice([0, 1, 2]))
    requests: list[Request] = []
    stems = [[rng.randrange(vocab) for _ in range(150)] for _ in range(3)]
    for number in range(300):
        if rng.random() < 0.25 and len(scheduler.waiting) < 3:
            stem = rng.choice([stem[: rng.randrange(150)] for stem in stems])
            if rng.random() < 0.3 and (over := [r for r in requests if r.is_done]):
                last = rng.choice(over[-4:])  # the next turn of a conversation
                stem = (last.prompt_ids + last.output.token_ids)[:250]
            prompt = stem + [rng.randrange(vocab) for _ in range(rng.randrange(1, 12))]
            requests.append(new_request(prompt, rng.choice([1, 5, 30, 90]), speculate=rng.random() < 0.7))
            engine.submit(requests[-1:])
        if rng.random() < 0.03 and (going := [request for request in requests if not request.is_done]):
            engine.cancel(rng.choice(going))
        memory.fails, memory.copies_fail = rng.random() < 0.03, rng.random() < 0.03
        try:
            engine.step()
        except MemoryError:
            assert memory.copies_fail and not scheduler.states
        if number % 5 == 0:  # a page that is lost stays lost
            balanced(engine)
    balanced(engine)
    memory.fails = memory.copies_fail = False
    while not engine.is_idle:
        engine.step()
    totals = engine.totals()
    assert totals.pages_used == totals.local_pages_used == 0 and totals.local_pages_total == local.capacity
    assert (
        memory.reads > 5_000
        and sum(request.is_done and not request.cancelled and request.error is None for request in requests) > 15
    )
    if caching:
        assert admission.hit_tokens > 100 and (memory.copied > 20 or span == 1)
