"""A runner without a device, for tests of the scheduler.

Like a rank, this runner knows only what steps say: the owner of each row, how far its prompt has run, and its pages.
"""

from __future__ import annotations

import pickle
import random
from dataclasses import replace

from specdec.generation import Emitted
from specdec.steps import (
    EnterRows,
    GrowRows,
    LeaveRows,
    RowEntry,
    RunChunk,
    RunMixed,
    RunRound,
    Step,
    StopDrafting,
)


class Written:
    """The tokens of a launch, which may be read once."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.rows, self.ended = rows, list[int]()
        self.is_over = False

    def read(self) -> list[Emitted]:
        assert not self.is_over, "read twice"
        self.is_over = True
        return [Emitted(tokens) for tokens in self.rows]

    def drop(self) -> None:
        assert not self.is_over
        self.is_over = True

    def seconds(self) -> float:
        return 1e-3


class RowsOnly:
    """A runner that keeps books instead of tensors, and refuses any step that a device could not execute."""

    def __init__(self, rows: int, rng: random.Random, shares_pages: bool = False) -> None:
        self.rows, self.rng, self.shares_pages = rows, rng, shares_pages
        self.entries: dict[int, RowEntry] = {}
        self.done: dict[int, int] = {}
        self.running: set[int] = set()
        self.prompts: dict[int, list[int]] = {}  # tokens seen by row, for the test to compare
        self.steps: list[Step] = []
        self.clean = set(range(rows))
        self.rounds: list[tuple[str, int]] = []  # by kind, and how many tokens the first row was given
        self.ends_at = 0  # the number of the round in which the first row's drafts end; 0: none

    def run(self, step: Step) -> Written | None:
        assert pickle.loads(pickle.dumps(step)) == step, "a step is plain data, the same on every rank"
        self.steps.append(step)
        return getattr(self, type(step).__name__)(step)

    def EnterRows(self, step: EnterRows, fresh: bool = True) -> None:
        for entry in step.entries:
            assert entry.row in self.clean, "the row is somebody's, or was not cleared"
            self.clean.remove(entry.row)
            for group, pages in enumerate(entry.pages):
                owned = [page for other in self.entries.values() for page in other.pages[group]]
                assert (self.shares_pages or not set(pages) & set(owned)) and 0 not in pages
            self.entries[entry.row] = entry
            if fresh:
                self.done[entry.row], self.prompts[entry.row] = -1, []

    def GrowRows(self, step: GrowRows) -> None:
        for row, first, pages in step.growths:
            entry = self.entries[row]
            assert row in self.running and pages[0] and {len(table) for table in entry.pages} == {first}
            grown = tuple((*table, *more) for table, more in zip(entry.pages, pages, strict=True))
            del self.entries[row]
            self.clean.add(row)
            self.EnterRows(EnterRows((replace(entry, row=row, pages=grown),)), fresh=False)

    def RunChunk(self, step: RunChunk) -> Written:
        for part in step.parts:
            assert part.row in self.entries and part.row not in self.running and part.token_ids
            begins = self.done[part.row] < 0 and (self.shares_pages or part.start == 0)
            assert begins or part.start == self.done[part.row], "a prompt's parts follow each other"
            self.done[part.row] = part.end
            self.prompts[part.row] += part.token_ids
            if part.is_last:
                self.running.add(part.row)
        return Written([[7] if part.emits else [] for part in step.parts])

    def RunRound(self, step: RunRound) -> Written:
        assert self.running and max(self.running) < step.rows <= self.rows
        most = step.spec.max_steps if step.spec else 0
        written = Written([[8] * (self.rng.randint(0, most) + 1) for _ in range(step.rows)])
        self.rounds.append((step.kind, len(written.rows[0])))
        written.ended = [0] if len(self.rounds) == self.ends_at else []
        return written

    def RunMixed(self, step: RunMixed) -> Written:
        assert not self.running & {part.row for part in step.chunk.parts}
        written, firsts = self.RunRound(step.round), self.RunChunk(step.chunk)
        return Written(written.rows + firsts.rows)

    def StopDrafting(self, step: StopDrafting) -> None:
        assert set(step.rows) <= self.running

    def LeaveRows(self, step: LeaveRows) -> None:
        assert step.cleared and len({target for _, target in step.moves}) == len(step.moves)
        for books in (self.entries, self.done, self.prompts):
            before = dict(books)  # type: ignore[call-overload]
            for source, target in step.moves:
                books[target] = before[source]  # type: ignore[index]
            for row in step.cleared:
                books.pop(row, None)  # type: ignore[attr-defined]
        ran = {target for source, target in step.moves if source in self.running}
        self.running -= {target for _, target in step.moves} | set(step.cleared)
        self.running |= ran
        self.clean |= set(step.cleared)
