"""What a round of each shape costs at one batch size, in seconds: as measured, or estimated from other shapes.

Shapes are measured at different times.  A round reads the keys and values of all rows, so its cost grows with their tokens, by
as much for one shape as for another: that growth is learned from the shapes that run, and taken off.  What a shape shows beyond
it while it runs steadily (a GPU that slows down, another program that is busy) makes the others as much slower.  A shape that
was tried (run on the side, its results thrown away) counts as measured until it has run; a shape of which nothing is known lies
on a line through its neighbours.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from specdec.config import SpecConfig

Shape = SpecConfig | None  # None: a round of no levels, plain decoding that keeps what the drafter will need

SMOOTHING = 0.15  # the weight of the newest cost in the moving average; more for the first ones,
MAX_GROWTH = 1.3  # which counts as so much of the average at most: what held one round up says little of the next
# All costs move with that of a shape which so many of so many last rounds had: what a shape shows in fewer rounds in a row may
# be its own, and what is known of it too old.
STEADY, LAST = 12, 16
GUESS_AGAIN = 32  # rounds of a shape after which what is not known is guessed anew
SETTLING = 4  # so many costs of a shape are counted by the lower median, because something may have disturbed one of them
DOUBT, DOUBT_GROWS = 0.03, 2000.0  # which share less a shape may cost than is known, and the rounds in which that grows
GROWTH_MEMORY = 500.0  # rounds that the growth with the rows' tokens is learned from
SLOWLY = 0.02  # the weight of the newest round in the averages that it is learned from
NO_GROWTH = 1e6  # tokens squared: unless tokens have differed by far more, the growth is taken to be small
MAX_OF_COST = 0.5  # the share of a round that tokens are taken to cost at most: a machine that slows down looks alike


@dataclass
class RoundCost:
    """What was measured of one shape."""

    seconds: float  # these two: moving averages over its rounds
    tokens: float
    pace: float  # Costs._pace at the last of them
    tried: RoundCost | None = None  # what a trial showed, if there was one before the first round
    long_seconds: float = 0.0  # these two: averages over more rounds
    long_tokens: float = 0.0
    first: list[float] = field(default_factory=list)  # the first rounds
    runs: int = 0  # how many were measured
    at: int = 0  # when the last one was, in rounds of any shape


class Costs:
    """Costs of the shapes of one batch size.

    first_counts: whether a shape's first round tells its cost; not where it also compiles.
    like: costs of another batch size, from which those of shapes are told that were never measured at this one.
    tokens: of all rows together in the next round.  growth: seconds that a round takes longer for each of them.
    """

    def __init__(self, first_counts: bool, like: Costs | None = None) -> None:
        self.first_counts, self.like = first_counts, like
        self.tokens, self.growth = 0.0, 0.0
        self._measured: dict[Shape, RoundCost] = {}
        self._skipped = set[Shape]()  # shapes that have run once, which did not count
        self._pace, self._rounds = 1.0, 0
        self._last = deque[Shape](maxlen=LAST)
        self._squares = self._products = 0.0  # of what tokens, and tokens and seconds, were apart from a shape's averages
        self._late = -1, 0.0  # what _least_surprise found, and after how many rounds
        self._guesses: dict[Shape, float] = {}  # of shapes of which nothing is known, at a pace of 1; made anew now and then

    def tried(self, shape: Shape, seconds: float, tokens: float = 0.0) -> None:
        """Records the seconds of a round on the side.  tokens: of all rows together."""
        if self.runs(shape) == 0:
            self._measured[shape] = RoundCost(seconds, tokens, self._pace)
            self._guesses.clear()

    def observe(self, shape: Shape, seconds: float, tokens: float = 0.0) -> None:
        """Records the seconds from the end of the round before this one to its own end."""
        self.tokens = tokens
        self._rounds += 1
        self._last.append(shape)
        known = self._measured.get(shape)
        if known is None and not self.first_counts and shape not in self._skipped:
            self._skipped.add(shape)
            return
        if known is None or known.runs == 0:
            known = self._measured[shape] = RoundCost(seconds, tokens, self._pace, tried=known)
        known.runs, known.at = known.runs + 1, self._rounds
        if known.runs <= SETTLING or known.runs % GUESS_AGAIN == 0:
            self._guesses.clear()
        if known.runs <= SETTLING:
            known.first.append(seconds)
            known.seconds = sorted(known.first)[(len(known.first) - 1) // 2]
            known.tokens += (tokens - known.tokens) / known.runs
            known.long_seconds, known.long_tokens, known.pace = known.seconds, known.tokens, self._pace
            return
        self._learn(known, seconds, tokens)

    def _learn(self, known: RoundCost, seconds: float, tokens: float) -> None:
        """Adds a round to a shape's averages, and learns from it what holds for all shapes."""
        expected, weight, slow = self._seconds(known, tokens), max(SMOOTHING, 1 / known.runs), max(SLOWLY, 1 / known.runs)
        surprise, apart = min(seconds, MAX_GROWTH * expected) - expected, tokens - known.tokens
        known.seconds = expected - self.growth * apart + weight * (surprise + self.growth * apart)
        known.tokens += weight * apart
        fade = 1 - 1 / GROWTH_MEMORY
        tokens_off, seconds_off = tokens - known.long_tokens, expected + surprise - known.long_seconds
        self._squares = self._squares * fade + tokens_off * tokens_off
        self._products = self._products * fade + tokens_off * seconds_off
        known.long_tokens += slow * tokens_off
        known.long_seconds += slow * seconds_off
        most = MAX_OF_COST * expected / max(1.0, tokens)
        self.growth = min(most, max(0.0, self._products / (self._squares + NO_GROWTH)))
        if self._last.count(self._last[-1]) >= STEADY:
            self._pace *= 1 + weight * surprise / expected
        known.pace = self._pace

    def runs(self, shape: Shape) -> int:
        """How many rounds of a shape were measured."""
        return self._measured[shape].runs if shape in self._measured else int(shape in self._skipped)

    def is_known(self, shape: Shape) -> bool:
        """Whether the shape has run or was tried."""
        return shape in self._measured

    def is_told(self, shape: Shape) -> bool:
        """Whether it has here, or at a batch size of which these costs are told."""
        return self.is_known(shape) or (self.like is not None and self.like.is_told(shape))

    def doubt(self, shape: Shape) -> float:
        """Which share less the shape may well cost: nothing if it ran lately, more the longer that is ago."""
        known = self._measured.get(shape)
        if known is None or known.runs < SETTLING:
            return DOUBT
        return DOUBT * min(1.0, (self._rounds - known.at) / DOUBT_GROWS)

    def of(self, shape: Shape) -> float:
        """Seconds of a round with the rows as they are.  Something must be known.

        A round with fewer levels and nodes costs no more than one with more.  Where what was measured says otherwise, the
        machine was busy while one of them was measured, and the one that has run more often is right.
        """
        found, runs, (levels, nodes) = self._own(shape), self.runs(shape), _work(shape)
        for other, known in self._measured.items():
            if known.runs > runs:
                more_levels, more_nodes = _work(other)
                if more_levels >= levels and more_nodes >= nodes:
                    found = min(found, self._seconds(known, self.tokens))
                elif more_levels <= levels and more_nodes <= nodes:
                    found = max(found, self._seconds(known, self.tokens))
        return found

    def _own(self, shape: Shape) -> float:
        """The same, by the shape's own rounds alone if it has run or was tried."""
        known = self._measured.get(shape)
        if known is not None:
            return self._seconds(known, self.tokens) + (self._least_surprise() if known.runs == 0 else 0.0)
        if shape not in self._guesses:
            self._guesses[shape] = self._guess(shape) / self._pace
        return max(1e-9, self._guesses[shape] * self._pace)

    def _seconds(self, known: RoundCost, tokens: float) -> float:
        """What was measured, as it would be now with so many tokens."""
        now = known.seconds * self._pace / known.pace
        return max((1 - MAX_OF_COST) * now, now + self.growth * (tokens - known.tokens))

    def _least_surprise(self) -> float:
        """The least that shapes took more when they ran than when they were tried.

        Where the host is slower than the device, it is slower for cheap rounds than for others.
        """
        if self._late[0] == self._rounds:
            return self._late[1]
        both = [(ran, ran.tried) for ran in self._measured.values() if ran.tried is not None]
        late = [self._seconds(ran, self.tokens) - self._seconds(tried, self.tokens) for ran, tried in both]
        self._late = self._rounds, max(0.0, min(late, default=0.0))
        return self._late[1]

    def _guess(self, shape: Shape) -> float:
        """Seconds of a shape of which nothing is known."""
        if self.like is not None and (self.like.is_told(shape) or len(self._measured) < 2):  # which shows no slope
            both = [other for other in self._measured if self.like.is_told(other)]
            if both:
                return self.like.of(shape) * sum(map(self.of, both)) / sum(map(self.like.of, both))
            if not self._measured:
                return self.like.of(shape)
        levels, nodes = _work(shape)
        return self._chain(levels) + max(0, nodes - levels - 1) * self._node()

    def _chain(self, levels: int) -> float:
        """Seconds of a chain of so many levels, on the line through the nearest two that are known."""
        chains = ((shape.max_steps if shape else 0, shape) for shape in self._measured if is_narrow(shape))
        known = {depth: self.of(shape) for depth, shape in chains}
        if not known:
            return min(self.of(shape) for shape in self._measured)
        if levels in known or len(known) == 1:
            return known.get(levels, next(iter(known.values())))
        near, other = sorted(sorted(known, key=lambda depth: (abs(depth - levels), depth))[:2])
        slope = max(0.0, known[other] - known[near]) / (other - near)
        return max(1e-9, known[near] + (levels - near) * slope)

    def _node(self) -> float:
        """What each node costs that a tree has more than a chain as deep."""
        found = [
            (self.of(shape) - self._chain(shape.max_steps)) / more
            for shape in self._measured
            if shape is not None and (more := shape.spare_nodes) > 0
        ]
        return max(0.0, min(found, default=0.0))


def is_narrow(shape: Shape) -> bool:
    """Whether a round of the shape has no more nodes than a chain as deep."""
    return shape is None or shape.topk == 1 and shape.spare_nodes == 0


def _work(shape: Shape) -> tuple[int, int]:
    """Levels and nodes of a round."""
    return (shape.max_steps, shape.num_draft_tokens) if shape else (0, 1)
