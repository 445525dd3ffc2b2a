"""SpecConfig("auto"): chooses the shape of each round (no levels, a chain or a tree) for the most tokens a second.

A shape is worth its expected tokens (`acceptance.py`) over its cost at the batch's number of rows (`costs.py`).  What is chosen
depends on verified rounds and their measured seconds alone.

Other shapes than the best one run now and then, because what is known of them grows old.  While a tree or a chain runs, another
shape is judged by what it may well reach, as far as the running one's rounds do not tell.  While no levels run, nothing is told
of drafts, and a round with a draft is a look.  A look loses some time, which an account pays for: a small share of all time
goes into it, and a share that halves with every look that changed nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from specdec.config import SpecConfig
from specdec.engine.control.acceptance import Acceptance
from specdec.engine.control.costs import Costs, Shape, is_narrow
from specdec.engine.control.path_rates import PREDICTED
from specdec.limits import MAX_PAUSE
from specdec.steps import Needs

GAIN = 0.015  # the threshold for another shape: it must promise this share more tokens per second
LOOKING = 0.004, 0.002  # the share of time that looks may lose: after a change of shape, and after a look that changed nothing
MAX_SAVED = 3.0  # rounds' time that the account holds at most
JUDGE_EVERY = 4  # rounds from one judgement of all shapes to the next
MIN_WAIT = 24  # rounds between two looks, at least
TRUST = 10.0  # what was observed before a pause counts as so many observations when the drafter is looked at again
FIRST_RUNS = 3  # where shapes can't be tried on the side, the first ones run so often to be measured; the first compiles


class RoundSize(NamedTuple):
    """What a round's cost depends on besides its shape.

    rows: of the batch.  grammar: whether the round runs phase by phase, for the masks of a grammar (see `Needs`).  predicted:
    whether requests bring predictions, of which much more is accepted than of other sources.
    """

    rows: int
    grammar: bool = False
    predicted: bool = False

    @classmethod
    def of(cls, rows: int, needs: Needs) -> RoundSize:
        return cls(rows, needs.grammar, "prediction" in needs.steps)

    def __str__(self) -> str:
        beside = f"{' with a grammar' if self.grammar else ''}{' with predictions' if self.predicted else ''}"
        return f"{self.rows} row{'' if self.rows == 1 else 's'}{beside}"


@dataclass
class AlikeRounds:
    """Rounds of one shape and as many rows, whose rows stand after each other.  told: what is to learn from them.  The other
    fields: see Controller.observe.
    """

    shape: SpecConfig
    told: Acceptance
    best: list[tuple[int, int]] | None
    matched: list[int] | None
    accepted: list[int] = field(default_factory=list)
    rounds: int = 0

    def add(self, accepted: Sequence[int], best: Sequence[tuple[int, int]] | None, matched: Sequence[int] | None) -> None:
        self.accepted += accepted
        self.rounds += 1
        if self.best is not None and best is not None:
            self.best += best
        if self.matched is not None and matched is not None:
            self.matched += matched


@dataclass
class SizeStats:
    """What is known of one size."""

    costs: Costs
    first: list[SpecConfig]  # the shapes that are measured before anything is chosen
    begins: Shape = None  # what runs first where the size begins with what another one says
    best: Shape = None  # the one last found the best; a look is none
    account: float = 0.0  # seconds that looks may lose
    share: float = LOOKING[0]  # of all time, which goes there
    since: int = 0  # rounds since the last look
    missed: dict[Shape, float] = field(default_factory=dict)  # seconds that a shape would have saved, if it had been ready
    rounds: int = 0  # so many were chosen
    rates: dict[Shape, float] = field(default_factory=dict)  # as last judged, tokens a second and row
    judged: tuple[float, Sequence[Shape]] | None = None  # the share of rows and the shapes for which that was
    _knows_enough: bool = False

    def smallest(self) -> SpecConfig:
        """Of the first shapes, the one of the least work."""
        return min(self.first, key=lambda shape: (shape.num_draft_tokens, shape.max_steps))

    def knows_enough(self) -> bool:
        """Whether the first shapes and that of no levels have run or were tried."""
        self._knows_enough = self._knows_enough or all(self.costs.is_known(shape) for shape in (None, *self.first))
        return self._knows_enough


class Controller:
    """Chooses among shapes.

    shapes: all but that of no levels.  ready_seconds: how long it takes to make one ready, as where a graph must be captured
    first: it is tried on the side before it runs; 0: none is.  first_accepted: see Acceptance.
    """

    def __init__(self, shapes: Sequence[SpecConfig], ready_seconds: float = 0.0, first_accepted: float | None = None) -> None:
        assert shapes, "a drafter can grow some shape"
        self.shapes, self.tries, self.ready_seconds = tuple(shapes), ready_seconds > 0, ready_seconds
        self.all: tuple[Shape, ...] = (None, *self.shapes)
        self.has_looked = first_accepted is not None
        depths = max(0 if shape.max_depth is None else shape.levels for shape in shapes)
        levels = max(shape.max_steps for shape in shapes)
        self.acceptance = Acceptance(levels, first_accepted, depths)
        self.of_predicted = Acceptance(levels, first_accepted, depths, PREDICTED)  # of rounds with predictions
        self.books: dict[RoundSize, SizeStats] = {}
        self._alike: AlikeRounds | None = None  # the last rounds, if they had one shape and as many rows

    # ---- what rounds have shown ----

    def observe(
        self,
        size: RoundSize,
        shape: Shape,
        seconds: float,
        accepted: Sequence[int],
        best: Sequence[tuple[int, int]] | None = None,
        tokens: int = 0,
        matched: Sequence[int] | None = None,
    ) -> None:
        """A round was verified, from whose rows the numbers are that say how far drafts are right.

        accepted: how many draft tokens each accepted.  best: see Emitted; None for a chain.  tokens: of all rows at its start.
        matched: how many of the first of them other sources than the drafter proposed; None where there are no such sources.
        """
        self._book(size).costs.observe(shape, seconds, tokens)
        if shape is None or not accepted:
            return
        alike = self._alike
        kind = shape, self._acceptance(size)
        if alike and ((alike.shape, alike.told) != kind or len(alike.accepted) != alike.rounds * len(accepted)):
            self._learn()
        if self._alike is None:
            self._alike = AlikeRounds(*kind, None if best is None else [], None if matched is None else [])
        self._alike.add(accepted, best, matched)

    def _learn(self) -> None:
        """Hands rounds that were verified to the estimate of acceptance: several at once, which takes the host less time."""
        if self._alike is not None:
            same = self._alike
            same.told.observe(same.shape, same.accepted, same.best, same.rounds, same.matched)
            self._alike = None

    def _acceptance(self, size: RoundSize) -> Acceptance:
        return self.of_predicted if size.predicted else self.acceptance

    def tried(self, size: RoundSize, shape: Shape, seconds: float, tokens: int = 0) -> None:
        """A shape was tried on the side, with rows of so many tokens together."""
        self._book(size).costs.tried(shape, seconds, tokens)

    # ---- what runs next ----

    def wanted(self, size: RoundSize, share: float, ready: Collection[Shape]) -> list[Shape]:
        """The shapes to make ready before the next round: the first ones, and later one that is worth it.

        A shape is worth it once the rounds without it have lost as much time as it takes to make ready.  So no more is ever
        paid than twice what the best choice in hindsight would have paid.
        """
        if len(ready) > len(self.shapes):
            return []
        book = self._book(size)
        if first := [shape for shape in dict.fromkeys((None, *book.first, book.best)) if shape not in ready]:
            return first
        if not book.knows_enough() or book.rounds % JUDGE_EVERY:
            return []
        self._learn()
        rates = self.rates(size, share, self.all, book.best)
        best = max(rates, key=lambda shape: rates[shape])
        if best in ready:
            return []
        gain = book.costs.of(best) * (rates[best] / max(rates[shape] for shape in ready) - 1)
        missed = book.missed[best] = book.missed.get(best, 0.0) + JUDGE_EVERY * max(0.0, gain)
        if missed < self.ready_seconds:
            return []
        book.missed.clear()
        return [best]

    def choose(self, size: RoundSize, share: float, pause: int, ready: Sequence[Shape] | None = None) -> Shape:
        """The shape of the next round; None: no levels.

        share: of the running rows, those that speculate; the others gain nothing from a draft and wait for it.
        pause: rounds of no levels since the drafter last caught up.  ready: shapes that may run; None: all.
        """
        usable = self.all if ready is None else ready
        book = self._book(size)
        if unmeasured := self._unmeasured(size, usable, share):
            return unmeasured[0]
        if self._is_due(book) or book.judged != (share, usable):
            self._learn()
            book.judged, book.rates = (share, usable), self.rates(size, share, usable, book.best)
            if (best := self._better(book.best, book.rates)) != book.best:
                book.best, book.share = best, LOOKING[0]
        book.rounds += 1
        return self._look(size, share, pause)

    def _is_due(self, book: SizeStats) -> bool:
        """Whether all shapes are to be judged now: seldom where no levels run and nothing was told of drafts since."""
        tells = book.best is not None or self._alike is not None
        return book.rounds % (JUDGE_EVERY if tells else MAX_PAUSE) == 0

    def _better(self, now: Shape, rates: dict[Shape, float]) -> Shape:
        """The shape to go on with: another one if it promises more by a margin, none if the present one is worth no more."""
        best, most = max(rates.items(), key=lambda item: item[1])
        if now not in rates or most >= (1 + GAIN) * rates[now]:
            return best
        return now if rates[now] >= (1 + GAIN / 2) * rates.get(None, 0.0) else None

    def rates(self, size: RoundSize, share: float, shapes: Sequence[Shape], runs: Shape = None) -> dict[Shape, float]:
        """Tokens a second and row: as expected, or where a shape runs, what others may well reach of which less is known."""
        costs, lengths = self._book(size).costs, self._acceptance(size).accept_lengths(shapes, runs)
        found = dict[Shape, float]()
        for shape, length in zip(shapes, lengths, strict=True):
            least = 1.0 if runs is None or shape == runs else 1 - costs.doubt(shape)
            found[shape] = (1 + share * (length - 1)) / (least * costs.of(shape))
        return found

    def reason(self, size: RoundSize, share: float = 1.0) -> str:
        """What runs at that size, and why.  Any thread may ask, so nothing is learned here."""
        book = self.books.get(size)
        if book is None or not book.rounds or not book.costs.is_known(book.best):
            return f"{size}: none yet; {self._measured_so_far(size, share)}"
        best = self._better(book.best, self.rates(size, share, self.all, book.best))  # which runs next
        rates = self.rates(size, share, [shape for shape in self.all if shape != best])
        second = max(rates, key=lambda shape: rates[shape])
        acceptance = self._acceptance(size)
        levels = " ".join(f"{probability:.2f}" for probability in acceptance.rates(5))
        if not acceptance.reached[0]:
            source = "by the look at the drafter" if self.has_looked else "as is assumed"
            levels += f", {source}: no round has drafted yet"
        if acceptance.matches.reached:
            of_paths = " ".join(f"{rate:.2f}" for rate in acceptance.matches.rates(5))
            levels += f", tokens of other sources with {of_paths}"
        return (
            f"{size}: {self._line(size, best, share)}; next best {self._line(size, second, share)}; "
            f"a chain's levels are accepted with {levels}"
        )

    def _measured_so_far(self, size: RoundSize, share: float) -> str:
        """What is known before anything is chosen: the first shapes run one after the other, so that their costs show."""
        book = self.books.get(size)
        if book is None:
            return "no round ran"
        shapes: list[Shape] = [*book.first, None] if self.tries else [None, book.smallest()]
        known = [self._line(size, shape, share) for shape in shapes if book.costs.is_known(shape)]
        missing = ", ".join(label(shape) for shape in shapes if not book.costs.is_known(shape))
        found = "the first round of a shape is not timed, as it may compile"
        found = f"measured so far: {', '.join(known)}" if known else found
        return f"{found}; to be measured: {missing}" if missing else found

    def _line(self, size: RoundSize, shape: Shape, share: float) -> str:
        tokens, cost = self._tokens(size, shape, share), self._book(size).costs.of(shape)
        return f"{label(shape)} with {tokens:.2f} tokens in {1e3 * cost:.2f} ms"

    def _tokens(self, size: RoundSize, shape: Shape, share: float) -> float:
        return 1 + share * (self._acceptance(size).accept_lengths([shape])[0] - 1)

    def _book(self, size: RoundSize) -> SizeStats:
        """The size's own book, which begins with what the nearest one says, of those with a grammar or without, as it is."""
        if size not in self.books:

            def unlike(other: RoundSize) -> tuple[bool, float, bool]:
                return other.grammar != size.grammar, abs(math.log(other.rows / size.rows)), other.predicted != size.predicted

            near = min(self.books, key=unlike, default=None)
            if near is None:
                self.books[size] = SizeStats(Costs(first_counts=self.tries), first_shapes(self.shapes))
            else:
                book = self.books[near]
                first = [book.best or (book.first[0] if self.tries else book.smallest())]
                self.books[size] = SizeStats(Costs(self.tries, book.costs), first, book.best, book.best)
        return self.books[size]

    def _unmeasured(self, size: RoundSize, usable: Sequence[Shape], share: float) -> list[Shape]:
        """The shapes to run because too little is known of costs; none if enough is.

        Where a shape can't be tried on the side, its first rounds cost what they cost.  So no levels run first, then the shape
        of the least work until it has been measured or seems worth nothing; what others cost is guessed from these.  A size
        that begins with what another one says runs the best shape there, which tells how all costs differ: a round of no levels
        only to be measured would emit a tenth of what one with a prediction does, at every size that a batch passes.
        """
        book = self._book(size)
        if self.tries:  # what was tried is read a round late
            return [] if book.knows_enough() else [shape for shape in book.first if shape in usable]
        like = book.costs.like
        if like is not None and all(like.is_told(shape) for shape in (None, *book.first)):
            return [] if book.costs.runs(book.begins) >= FIRST_RUNS else [book.begins]
        small = book.smallest()
        unmeasured = [shape for shape in (None, small) if book.costs.runs(shape) < FIRST_RUNS]
        if unmeasured == [small]:
            if not self._is_due(book):
                return []
            self._learn()
            worth = self._tokens(size, small, share) * book.costs.of(None) / book.costs.of(small)
            return unmeasured if worth >= 1 + GAIN else []
        return unmeasured

    def _look(self, size: RoundSize, share: float, pause: int) -> Shape:
        """The best shape, or another one to be looked at."""
        book = self._book(size)
        best, rates = book.best, book.rates
        if best is not None:
            return best  # what is doubtful of other shapes speaks for them, so they run when they may be better
        cost = book.costs.of(None)
        book.account, book.since = min(book.account + book.share * cost, MAX_SAVED * cost), book.since + 1
        if book.since < MIN_WAIT or pause < MAX_PAUSE:
            return None  # a look waits until the drafter has to catch up anyway
        looks = [shape for shape in rates if shape is not None]
        if not looks:
            return None
        look = max(looks, key=lambda shape: rates[shape])
        if book.costs.of(look) - self._tokens(size, look, share) / rates[None] > book.account:
            return None
        book.account, book.since = 0.0, 0
        book.share = max(LOOKING[1], book.share / 2)
        self._learn()
        self._acceptance(size).trust(TRUST)
        return look


def label(shape: Shape) -> str:
    """How a reason names a shape."""
    return "no levels" if shape is None else f"{'chain' if shape.topk == 1 else 'tree'} {shape.label}"


def first_shapes(shapes: Sequence[SpecConfig]) -> list[SpecConfig]:
    """Those from which the costs of all others can be told: a long and a short chain, and the widest tree."""
    chains, trees = ([shape for shape in shapes if is_narrow(shape) == narrow] for narrow in (True, False))
    found = [min(chains, key=lambda shape: abs(shape.max_steps - levels)) for levels in (5, 2)] if chains else []
    if trees:
        found.append(max(trees, key=lambda shape: (shape.num_draft_tokens, -shape.max_steps)))
    return list(dict.fromkeys(found))
