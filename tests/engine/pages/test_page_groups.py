"""Two groups of layers in one model, without a device: whoever reads a position finds what belongs there.

The runner here keeps the contents of both groups' slots as a device would: which text they hold, and whether a drafter wrote
there.  Keeps out: a ring that overwrites a key which is still read, a page with two owners, a kept copy of a page that was
overwritten or never written, copies made in the wrong order, and pages that nobody gives back.
"""

import pickle
import random
from dataclasses import dataclass, field

import pytest
from toolkit.driver import new_request
from toolkit.pages import check_books, ring_passes_take

from specdec import SpecConfig
from specdec.attention.kinds import LayerKind
from specdec.engine.chunks import ChunkBudget
from specdec.engine.loop import Engine
from specdec.engine.pages.admission import Admission, PrefixHit
from specdec.engine.pages.groups import page_groups
from specdec.engine.pages.pool import PagePool
from specdec.engine.request import Request
from specdec.engine.scheduler import Scheduler
from specdec.engine.speculation import Speculation
from specdec.steps import CopyPages, Emitted, EnterRows, LeaveRows, RowEntry, RunChunk, RunRound, Step

SPEC = SpecConfig(3, 2, 6)
CHUNK = 24  # the most tokens of a prompt in one pass
JUNK = (0, -1, False)
Content = tuple[int, int, bool]  # a hash of the text up to a position, the token after it, whether a drafter wrote there too


@dataclass
class Row:
    """A row of the batch.

    entry: what the scheduler said of it.  text: the tokens so far, and hashes: of the text up to each of them.
    length: how many tokens are in the cache; -1: none has been computed.  running: whether the row takes part in rounds.
    """

    entry: RowEntry
    text: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    length: int = -1
    running: bool = False

    def add(self, tokens: list[int]) -> None:
        for token in tokens:
            self.hashes.append(hash((self.hashes[-1] if self.hashes else 0, token)))
            self.text.append(token)


class Written:
    ended = ()

    def __init__(self, rows: list[list[int]]) -> None:
        self.rows = rows

    def read(self) -> list[Emitted]:
        return [Emitted(tokens) for tokens in self.rows]

    def drop(self) -> None:
        pass

    def seconds(self) -> float:
        return 1e-3


class Memory:
    """A runner whose slots hold texts.  It checks every read of every pass.

    kinds: the kind of the layers of each group.  known: texts by their hash, for prompts whose beginning was found.
    """

    def __init__(self, kinds: list[LayerKind], page_size: int, rng: random.Random, vocab: int) -> None:
        self.kinds, self.page_size, self.rng, self.vocab = kinds, page_size, rng, vocab
        self.rows: dict[int, Row] = {}
        self.slots: list[dict[int, Content]] = [{} for _ in kinds]
        self.requests: dict[tuple[int, ...], list[int]] = {}  # a row's first table -> its prompt
        self.copied = self.reads = 0
        self.fails = self.copies_fail = False

    def run(self, step: Step) -> Written | None:
        assert pickle.loads(pickle.dumps(step)) == step
        return getattr(self, type(step).__name__)(step)

    def slot(self, row: Row, group: int, position: int) -> int:
        pages = row.entry.pages[group]
        page = pages[position // self.page_size] if position // self.page_size < len(pages) else 0
        return page * self.page_size + position % self.page_size

    def write(self, row: Row, position: int, content: Content) -> None:
        for group in range(len(self.kinds)):
            self.slots[group][self.slot(row, group, position)] = content

    def check(self, row: Row, queries: range) -> None:
        """Each query's keys are its own text's; the last query alone is checked in the group that reads all keys."""
        for group, kind in enumerate(self.kinds):
            for query in queries if kind.span is not None else queries[-1:]:
                first = 0 if kind.span is None else max(0, query - kind.span + 1)
                if kind.chunk is not None:
                    first = query - query % kind.chunk
                for key in range(first, query + 1):
                    text, after, drafted = self.slots[group][self.slot(row, group, key)]
                    assert text == row.hashes[key], (group, query, key)
                    if key + 1 < len(row.text) and row.entry.speculates:
                        assert drafted and after == row.text[key + 1], (group, query, key)
                    self.reads += 1

    def EnterRows(self, step: EnterRows) -> None:
        for entry in step.entries:
            assert entry.row not in self.rows and len(entry.pages) == len(self.kinds)
            assert len({len(pages) for pages in entry.pages}) == 1
            for group in range(len(self.kinds)):
                assert 0 not in entry.pages[group]
            if len(self.kinds) == 2:
                others = {page for row in self.rows.values() for page in row.entry.pages[1]}
                assert not others & set(entry.pages[1]), "a ring with two owners"
            self.rows[entry.row] = Row(entry)

    def CopyPages(self, step: CopyPages) -> None:
        assert len(set(step.targets)) == len(step.targets) == len(step.sources) and 0 not in step.targets
        if self.copies_fail and self.rng.random() < 0.5:
            raise MemoryError("a copy too large")
        slots, size = self.slots[step.group], self.page_size
        held = [[slots.get(page * size + i, JUNK) for i in range(size)] for page in step.sources]
        for page, contents in zip(step.targets, held, strict=True):
            slots.update({page * size + i: content for i, content in enumerate(contents)})
        self.copied += len(held)

    def RunChunk(self, step: RunChunk) -> Written:
        if self.fails:
            raise MemoryError("a chunk too long")
        emitted = []
        for part in step.parts:
            row = self.rows[part.row]
            if row.length < 0:  # what the prefix cache holds is not computed
                prompt = self.requests[tuple(row.entry.pages[0])]
                row.add(prompt[: part.start])
                row.length = part.start
            assert part.start == row.length and len(part.token_ids) <= CHUNK
            row.add(list(part.token_ids))
            emitted.append([self.rng.randrange(self.vocab)] if part.is_last else [])
            after = [*part.token_ids[1:], emitted[-1][0] if part.is_last else part.next_token]
            for i, next_token in enumerate(after):  # all are stored before the first is read
                self.write(row, part.start + i, (row.hashes[part.start + i], next_token, step.drafted))
            self.check(row, range(part.start, part.end))
            row.length, row.running = part.end, part.is_last
            row.add(emitted[-1])
        return Written(emitted)

    def RunRound(self, step: RunRound) -> Written:
        emitted: list[list[int]] = []
        for index in range(step.rows):
            row = self.rows.get(index)
            if row is None or not row.running:
                emitted.append([0])
                continue
            L, drafts = row.length, step.kind == "speculative"
            for position in range(L, L + (6 if drafts else 1)):
                self.write(row, position, JUNK)
            accepted = self.rng.randint(0, 3) if drafts and row.entry.speculates else 0
            emitted.append([self.rng.randrange(self.vocab) for _ in range(accepted + 1)])
            row.add(emitted[-1])
            for position in range(L, L + accepted + 1):
                self.write(row, position, (row.hashes[position], row.text[position + 1], drafts))
            row.length = L + accepted + 1
            self.check(row, range(L, row.length))
        return Written(emitted)

    def LeaveRows(self, step: LeaveRows) -> None:
        before = dict(self.rows)
        for source, target in step.moves:
            self.rows[target] = before[source]
        for row in step.cleared:
            self.rows.pop(row, None)


def balanced(engine: Engine[Memory]) -> None:
    """Every page of both pools is free or has one owner, and each node has at most one copy."""
    admission = engine.scheduler.admission
    if admission.cache is not None:
        check_books(admission, [state.request for state in engine.scheduler.states])
    for pool in (admission.pool, admission.local):
        if pool is not None:
            owned = [page for pages in pool._owned.values() for page in pages]
            assert sorted(owned + pool._free) == list(range(1, pool.num_pages))
    if admission.copies is not None:
        assert admission.local is not None
        copies = admission.copies._pages
        assert set(copies.values()) == admission.local._owned.get(admission.copies, set()) and len(copies) == len(
            set(copies.values())
        )


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

    class Noting(Admission):
        def admit(self, request: Request, found: PrefixHit) -> bool:
            done = super().admit(request, found)
            if done:
                memory.requests[tuple(self.allocations[request].table)] = request.prompt_ids
            return done

    admission = Noting(PagePool(1500 // page_size, page_size), SPEC.lookahead, caching, local, span)
    admission.min_shared_to_wait = 8
    budget = ChunkBudget(40, 60, 80, most=admission.max_chunk_tokens)
    scheduler = Scheduler(admission, budget, Speculation((SPEC,)), rows, pads_rows=False)
    memory = Memory([LayerKind(), kind], page_size, rng, vocab)
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
