"""A runner without a device whose slots hold texts: whoever reads a position must find what belongs there.

It keeps the contents of all groups' slots as a device would: which text they hold, and whether a drafter wrote there.  The
target's tokens follow from the text alone, so that whatever happens to a row, its text is known beforehand.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from specdec import SpecConfig
from specdec.attention.kinds import LayerKind
from specdec.engine.loop import Engine
from specdec.engine.request import Request
from specdec.engine.scheduler import Scheduler
from specdec.generation import Emitted, Logprobs
from specdec.steps import CopyPages, EnterRows, GrowRows, LeaveRows, RowEntry, RunChunk, RunMixed, RunRound, Step
from toolkit.pages import check_books

SPEC = SpecConfig(3, 2, 6)
CHUNK = 24  # the most tokens of a prompt in one pass
JUNK = (0, -1, False)
Content = tuple[int, int, bool]  # a hash of the text up to a position, the token after it, whether a drafter wrote there too


@dataclass
class Row:
    """A row of the batch.

    entry: what the scheduler said of it.  request: whose it is.  pages: of each group's table.
    text: the tokens so far, and hashes: of the text up to each of them.
    length: how many tokens are in the cache; -1: none has been computed.  running: whether the row takes part in rounds.
    """

    entry: RowEntry
    request: Request
    pages: list[list[int]]
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

    def __init__(self, rows: list[list[int]], scores: dict[int, list[Logprobs]] | None = None) -> None:
        self.rows, self.scores = rows, scores or {}

    def read(self) -> list[Emitted]:
        return [Emitted(tokens, scores=self.scores.get(i, ())) for i, tokens in enumerate(self.rows)]

    def drop(self) -> None:
        pass

    def seconds(self) -> float:
        return 1e-3


class Memory:
    """A runner whose slots hold texts.  It checks every read of every pass.

    kinds: the kind of the layers of each group.  scheduler: asked whose a row is, and for nothing else.  most: tokens of a
        prompt in one pass.
    """

    scheduler: Scheduler
    most: int = CHUNK

    def __init__(self, kinds: list[LayerKind], page_size: int, rng: random.Random, vocab: int) -> None:
        self.kinds, self.page_size, self.rng, self.vocab = kinds, page_size, rng, vocab
        self.rows: dict[int, Row] = {}
        self.slots: list[dict[int, Content]] = [{} for _ in kinds]
        self.copied = self.reads = self.grown = self.resumed = 0
        self.fails = self.copies_fail = False

    def run(self, step: Step) -> Written | None:
        assert pickle.loads(pickle.dumps(step)) == step
        return getattr(self, type(step).__name__)(step)

    def slot(self, row: Row, group: int, position: int) -> int:
        pages = row.pages[group]
        page = pages[position // self.page_size] if position // self.page_size < len(pages) else 0
        return page * self.page_size + position % self.page_size

    def write(self, row: Row, position: int, content: Content) -> None:
        for group in range(len(self.kinds)):
            self.slots[group][self.slot(row, group, position)] = content

    def check(self, row: Row, queries: range) -> None:
        """Each query's keys are its own text's; the last query alone is checked in the group that reads all keys."""
        for group, kind in enumerate(self.kinds):
            for query in queries if kind.span is not None else queries[len(queries) - 1 :]:
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
                others = {page for row in self.rows.values() for page in row.pages[1]}
                assert not others & set(entry.pages[1]), "a ring with two owners"
            request = self.scheduler.states[entry.row].request
            self.rows[entry.row] = Row(entry, request, [list(pages) for pages in entry.pages])

    def GrowRows(self, step: GrowRows) -> None:
        for row, first, pages in step.growths:
            held = self.rows[row].pages
            assert self.rows[row].running and len(pages) == len(held) and all(pages) and all(map(all, pages))
            for table, more in zip(held, pages, strict=True):
                assert len(table) == first
                table += more
        self.grown += 1

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
        emitted, scores = list[list[int]](), dict[int, list[Logprobs]]()
        for part in step.parts:
            row = self.rows[part.row]
            assert not (part.scored and row.length < 0 and part.start), "kept pages have no hidden states"
            if row.length < 0:  # what the prefix cache holds is not computed
                row.add(row.request.text[: part.start])
                row.length = part.start
                self.resumed += part.start > 0 and bool(row.request.output.token_ids)
            assert part.start == row.length and len(part.token_ids) <= self.most
            row.add(list(part.token_ids))
            own = self.next_token(row.text)
            emitted.append([own] if part.emits else [])
            scores[len(emitted) - 1] = [Logprobs([-float(part.start + i + 1)], []) for i in range(part.num_scores)]
            assert own == part.next_token or not part.resumes, "the last token is the target's"
            after = [*part.token_ids[1:], own if part.is_last else part.next_token]
            for i, next_token in enumerate(after):  # all are stored before the first is read
                self.write(row, part.start + i, (row.hashes[part.start + i], next_token, step.drafted))
            self.check(row, range(part.start, part.end))
            row.length, row.running = part.end, part.is_last
            row.add([own] if part.is_last else [])
        return Written(emitted, scores)

    def next_token(self, text: list[int]) -> int:
        """The target's token after a text."""
        return random.Random(f"{text}").randrange(self.vocab)

    def output(self, request: Request) -> list[int]:
        """What the request's output must be."""
        text = list(request.prompt_ids)
        for _ in range(request.sampling.max_tokens):
            text.append(self.next_token(text))
        return text[len(request.prompt_ids) :]

    def RunRound(self, step: RunRound) -> Written:
        emitted: list[list[int]] = []
        for index in range(step.rows):
            row = self.rows.get(index)
            if row is None or not row.running:
                emitted.append([0])
                continue
            L, drafts = row.length, step.kind == "speculative"
            reach, end = L + (6 if drafts else 1), len(row.request.prompt_ids) + row.request.sampling.max_tokens
            has_pages = all(len(pages) * self.page_size >= reach for pages in row.pages)
            assert has_pages or L >= end, "the round writes where the row has no pages"
            for position in range(L, reach):
                self.write(row, position, JUNK)
            accepted = self.rng.randint(0, 3) if drafts and row.entry.speculates else 0
            emitted.append([])
            for _ in range(accepted + 1):
                emitted[-1].append(self.next_token(row.text))
                row.add(emitted[-1][-1:])
            for position in range(L, L + accepted + 1):
                self.write(row, position, (row.hashes[position], row.text[position + 1], drafts))
            row.length = L + accepted + 1
            self.check(row, range(L, row.length) if L < end else range(0))
        return Written(emitted)

    def RunMixed(self, step: RunMixed) -> Written:
        around = self.RunRound(step.round)
        assert not any(part.scored for part in step.chunk.parts)
        return Written(around.rows + self.RunChunk(step.chunk).rows)

    def LeaveRows(self, step: LeaveRows) -> None:
        before = dict(self.rows)
        for source, target in step.moves:
            self.rows[target] = before[source]
        for row in step.cleared:
            self.rows.pop(row, None)


def drive(engine: Engine[Any], coming: Iterator[Request], rng: random.Random, balance: Callable[[], None]) -> list[Request]:
    """Runs these requests to their ends, which come at random times; some are cancelled, some chunks fail.  Returns them.

    balance: asserts that nothing is lost or owned twice, in between and at the end, when nobody holds anything.  Texts are
    the target's.
    """
    memory, scheduler, requests, more, steps = engine.runner, engine.scheduler, list[Request](), True, 0
    while more or not engine.is_idle:
        steps += 1
        if more and rng.random() < 0.3:
            for request in [next(coming, None) for _ in range(rng.randrange(1, 4))]:
                more = more and request is not None
                if request is not None:
                    if len(requests) % 5 == 1:
                        request.sampling = replace(request.sampling, prompt_logprobs=0)
                    requests.append(request)
                    engine.submit([request])
        if rng.random() < 0.02 and (going := [request for request in requests if not request.is_done]):
            engine.cancel(rng.choice(going))
        memory.fails = rng.random() < 0.015
        try:
            engine.step()
        except MemoryError:  # of a chunk beside a round: all that hold rows fail
            assert memory.fails and scheduler.mixing and not scheduler.states
        if steps % 4 == 0:
            balance()
        assert steps < 30_000, "somebody waits or steps back for ever"
    balance()
    assert not memory.rows and not scheduler.admission.allocations
    for request in requests:
        assert request.error is None or isinstance(request.error, MemoryError), "what the runner has found ends a request"
        if not request.cancelled and request.error is None:
            assert request.output.token_ids == memory.output(request)
            request.stats.check_identity(len(request.output.token_ids))
            if request.sampling.prompt_logprobs is not None:
                assert [-each.logprob for each in request.scores] == list(range(1, len(request.prompt_ids)))
    return requests


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
