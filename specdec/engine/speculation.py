"""Decides which kind of round comes next: plain, paused, or speculative with a tree of some shape.

A round in which no row speculates is plain.  With SpecConfig("auto"), another round of no levels is a paused round.  It keeps
the tokens that the drafter has not seen, at most MAX_PAUSE for each row that speculates, until the drafter catches up.  This
module knows numbers and the shapes of trees; `control/` chooses among them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from specdec.config import SpecConfig
from specdec.engine.control.controller import Controller, RoundSize
from specdec.engine.control.costs import Shape
from specdec.engine.control.path_rates import matched
from specdec.generation import Emitted
from specdec.limits import MAX_PAUSE
from specdec.steps import CatchUp, Needs, RunRound, Step, Try
from specdec.trees.shape import largest


class RoundKey(NamedTuple):
    """What a round's graph depends on, besides the shape of the tree.

    rows: of the batch, padding included.  needs: see RunRound.  shared: whether rows read common pages together.
    """

    rows: int
    needs: Needs
    shared: bool


class Speculation:
    """Chooses the kind of each round.

    shapes: those that a round's tree may have; none: there is no drafter.  Without a controller rows that ask for no shape take
        the first one.
    ready_seconds: how long it takes to capture a shape's round; 0: nothing is captured, so that any shape may run at any time.
    max_draft_length: of a text, beyond which nothing is drafted; None: there is no such length.
    first_accepted: see Acceptance.
    is_stopped: whether nothing is drafted, in any text, until somebody says otherwise; what runs goes on plainly.
    pause: paused rounds since the drafter last caught up; no row that speculates has more tokens than this that the drafter
        has not seen.  Whoever takes rows away sets it to 0 once no running row speculates, since no such token is left then.
    """

    def __init__(
        self,
        shapes: Sequence[SpecConfig],
        ready_seconds: float = 0.0,
        max_draft_length: int | None = None,
        is_auto: bool = False,
        first_accepted: float | None = None,
    ) -> None:
        self.shapes, self.max_draft_length = tuple(shapes), max_draft_length
        self.controller = Controller(shapes, ready_seconds, first_accepted) if is_auto else None
        self.is_stopped = False
        self.pause = 0
        self._tokens = 0  # of the rows with which a step is tried
        self._ready: dict[RoundKey, tuple[Shape, ...]] = {}  # what has been captured, where anything is

    @property
    def most_emitted(self) -> int:
        """The most tokens that a round emits in a row."""
        return 1 + max((shape.levels for shape in self.shapes), default=0)

    @property
    def may_be_over(self) -> bool:
        """Whether `is_over` can hold of any text."""
        return self.is_stopped or self.max_draft_length is not None

    def is_over(self, tokens: int) -> bool:
        """Whether nothing is drafted in a text of so many tokens, or in none at all."""
        return self.is_stopped or (self.max_draft_length is not None and tokens >= self.max_draft_length)

    def next_round(
        self,
        rows: int,
        needs: Needs,
        shared: bool,
        share: float,
        tokens: int = 0,
        asked: Collection[SpecConfig | None] = (),
    ) -> tuple[list[Step], RunRound]:
        """The next round, and what must run before it.

        rows, needs, shared: see RoundKey.  share: the share of the running rows that speculate, from 0 to 1.  tokens: of all
        rows together, as far as they are known.  asked: the shapes for which the rows that speculate ask; None: for none.

        All rows of a round have one shape: the largest one for which any of them asks.  For rows that ask for none, that counts
        as asked for which they would have by themselves.
        """
        if not share:
            assert not self.pause, "tokens that the drafter has not seen belong to a row that speculates"
            return [], RunRound(rows, "plain", None, needs, shared)
        batch, named = RoundKey(rows, needs, shared), {shape for shape in asked if shape is not None}
        takes_any = len(named) < len({*asked}) or not named
        if self.controller is None:
            spec = largest({*named, self.shapes[0]} if takes_any else named)
            return [], RunRound(rows, "speculative", spec, needs, shared)
        self._tokens = tokens
        shape, wanted = None, list[Shape]()
        if takes_any:
            shape, wanted = self._choose(batch, share)
        if named:
            shape = largest({*named, *([] if shape is None else [shape])})
            if self.controller.tries and shape not in self._ready.get(batch, ()):
                wanted.append(shape)
                self._made_ready(batch, [shape])
        before = list[Step]()
        if self.pause and (shape is not None or wanted or self.pause == MAX_PAUSE):
            before.append(CatchUp(*batch))
            self.pause = 0
        before += self._tries(batch, wanted)
        if shape is None:
            self.pause += 1
        return before, _round(batch, shape)

    def _choose(self, batch: RoundKey, share: float) -> tuple[Shape, list[Shape]]:
        """What the controller chooses, and the shapes that are to be made ready before."""
        assert self.controller is not None
        size, wanted, ready = RoundSize.of(batch.rows, batch.needs), list[Shape](), None
        if self.controller.tries:
            wanted = self.controller.wanted(size, share, self._ready.get(batch, ()))
            ready = self._made_ready(batch, wanted)
        return self.controller.choose(size, share, self.pause, ready), wanted

    def make_ready(self, sizes: Sequence[int]) -> list[Step]:
        """The steps that capture whatever may run later in batches of these numbers of rows, with needs that have occurred.

        To be run while no row is taken.
        """
        if self.controller is None or not self.controller.tries:
            return []
        assert not self.pause
        self._tokens = 0
        steps = list[Step]()
        for needs in list(dict.fromkeys(batch.needs for batch in self._ready)):
            for rows in sizes:
                batch = RoundKey(rows, needs, shared=False)
                missing = [shape for shape in (None, *self.shapes) if shape not in self._ready.get(batch, ())]
                self._made_ready(batch, missing)
                steps += self._tries(batch, missing)
        return steps

    def rounds(self, rows: int, needs: Needs) -> list[RunRound]:
        """The rounds that a batch of so many rows may run, but for those among which a controller chooses (`make_ready`)."""
        fixed = self.shapes if self.controller is None else ()
        return [RunRound(rows, "plain", None, needs), *(RunRound(rows, "speculative", spec, needs) for spec in fixed)]

    def observe(self, step: RunRound, seconds: float, told: Sequence[Emitted], tokens: int = 0) -> None:
        """Records a timed round, and how many draft tokens each row of it accepted that tells how far drafts are right.

        seconds: from the end of the round before it.  told: see Planned.  tokens: of all rows at its start.
        """
        if self.controller is not None:
            accepted, best = [len(row.tokens) - 1 for row in told], [row.best for row in told]
            by_others = [matched(row.sources) for row in told] if step.spec and step.spec.max_depth is not None else None
            size = RoundSize.of(step.rows, step.needs)
            self.controller.observe(size, step.spec, seconds, accepted, best, tokens, by_others)

    def tried(self, step: Try, seconds: float) -> None:
        """Records the seconds of a step that was tried."""
        if self.controller is not None and isinstance(step.step, RunRound):
            size = RoundSize.of(step.step.rows, step.step.needs)
            self.controller.tried(size, step.step.spec, seconds, self._tokens)

    def reasons(self) -> list[str]:
        """For each size that has run: which shape runs, and why.  Nothing where the shape is fixed."""
        return [] if self.controller is None else [self.controller.reason(size) for size in sorted(self.controller.books)]

    def _made_ready(self, batch: RoundKey, shapes: Sequence[Shape]) -> tuple[Shape, ...]:
        """Everything that is ready, now that these shapes are, in one order."""
        ready = self._ready.get(batch, ())
        if shapes:
            ready = self._ready[batch] = tuple(shape for shape in (None, *self.shapes) if shape in ready or shape in shapes)
        return ready

    def _tries(self, batch: RoundKey, shapes: Sequence[Shape]) -> list[Step]:
        catch_up = [Try(CatchUp(*batch))] if None in shapes else []
        return [*(Try(_round(batch, shape)) for shape in shapes), *catch_up]


def _round(batch: RoundKey, shape: Shape) -> RunRound:
    """A timed round of a batch."""
    rows, needs, shared = batch
    return RunRound(rows, "speculative" if shape else "paused", shape, needs, shared, timed=True)
