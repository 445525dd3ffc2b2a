"""A launch: what the runner runs in one pass, and whose rows it computes.  This module knows requests, and no page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specdec.engine.request import RequestState
from specdec.generation import Emitted
from specdec.steps import Pass, RunChunk, RunMixed, RunRound, Step


@dataclass(frozen=True)
class Planned:
    """One chunk or round, and whose it is.

    states: of the requests that held each part of the chunk, or each row of the round, when it was planned; None for a row of a
        round that does not run.
    speculates: of a round, which of its rows may accept draft tokens.
    """

    step: RunChunk | RunRound
    states: list[RequestState | None]
    speculates: tuple[bool, ...] = ()

    @property
    def size(self) -> int:
        """For how many rows or parts the runner says what they emit."""
        return self.step.rows if isinstance(self.step, RunRound) else len(self.step.parts)

    def told(self, emitted: Sequence[Emitted]) -> list[Emitted]:
        """Of the rows of a round, those that tell how far drafts are right: where a text halts, its path is cut, which refuses
        no draft.
        """
        halts = self.step.needs.halts
        rows = zip(emitted, self.speculates, strict=False)
        return [row for row, drafts in rows if drafts and row.tokens and not (halts and row.halted)]


@dataclass(frozen=True)
class Launch:
    """One pass for the runner: a chunk, a round, or a round and then a chunk.

    before: steps that must run before it.
    """

    before: list[Step]
    planned: tuple[Planned, ...]

    @property
    def step(self) -> Pass:
        """The step that runs all that is planned."""
        if len(self.planned) == 1:
            return self.planned[0].step
        around, beside = (each.step for each in self.planned)
        assert isinstance(around, RunRound) and isinstance(beside, RunChunk), "a round comes before its chunk"
        return RunMixed(around, beside)

    @property
    def states(self) -> list[RequestState | None]:
        """Those of everything that is planned."""
        return [state for each in self.planned for state in each.states]

    @property
    def emits(self) -> bool:
        """Whether the launch will emit tokens.  A chunk after which no output begins emits none, but perhaps scores of
        its tokens."""
        return any(
            isinstance(each.step, RunRound) or any(part.emits or part.scored for part in each.step.parts)
            for each in self.planned
        )

    def split(self, emitted: Sequence[Emitted]) -> Iterator[tuple[Planned, Sequence[Emitted]]]:
        """What is planned, each with its share of what the launch emitted."""
        at = 0
        for each in self.planned:
            yield each, emitted[at : at + each.size]
            at += each.size
