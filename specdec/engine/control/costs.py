"""What a round of each shape costs at one batch size, in seconds: as measured, or estimated from other shapes.

Shapes are measured at different times, and all costs drift alike as texts grow: the drift that the running shape shows is added
to what was measured of the others.  A shape that was tried (run on the side, its results thrown away) counts as measured until
it has run; a shape of which nothing is known lies on a line through its neighbours.
"""

from __future__ import annotations

from specdec.config import SpecConfig

Shape = SpecConfig | None  # None: a round of no levels, plain decoding that keeps what the drafter will need

SMOOTHING = 0.15  # the weight of the newest cost in the moving average,
MOST_GROWTH = 1.3  # which counts as so much of the average at most: what held one round up says little of the next
GUESS_AGAIN = 32  # rounds of a shape after which what is not known is guessed anew
SETTLING = 4  # so many costs of a shape are counted by their least, because something may have disturbed one of them


class Costs:
    """Costs of the shapes of one batch size.

    first_counts: whether a shape's first round tells its cost; not where it also compiles.
    like: costs of another batch size, from which those of shapes are told that were never measured at this one.
    """

    def __init__(self, first_counts: bool, like: Costs | None = None) -> None:
        self.first_counts, self.like = first_counts, like
        self._seconds: dict[Shape, float] = {}
        self._drift_at: dict[Shape, float] = {}  # _drift when the shape was measured
        self._drift = 0.0
        self._surprise: dict[Shape, float] = {}  # what a shape that had been tried took more when it ran
        self._seen: dict[Shape, int] = {}
        self._guesses: dict[Shape, float] = {}  # of shapes of which nothing is known, without drift; made anew now and then

    def tried(self, shape: Shape, seconds: float) -> None:
        """Records the seconds of a round on the side."""
        if shape not in self._surprise and self.runs(shape) == 0:
            self._seconds[shape], self._drift_at[shape] = seconds, self._drift
            self._guesses.clear()

    def observe(self, shape: Shape, seconds: float) -> None:
        """Records the seconds from the end of the round before this one to its own end."""
        known = self._known(shape)
        seen = self._seen[shape] = self.runs(shape) + 1
        if seen <= SETTLING or seen % GUESS_AGAIN == 0:
            self._guesses.clear()
        if seen == 1:
            if not self.first_counts and known is None:
                return
            if known is not None:
                self._surprise[shape] = seconds - known
            value = seconds
        elif known is None:
            value = seconds
        elif seen <= SETTLING:
            value = min(known, seconds)
            if shape in self._surprise:
                self._surprise[shape] += value - known
        else:
            value = known + SMOOTHING * (min(seconds, MOST_GROWTH * known) - known)
            self._drift += value - known
        self._seconds[shape], self._drift_at[shape] = value, self._drift

    def runs(self, shape: Shape) -> int:
        """How many rounds of a shape were measured."""
        return self._seen.get(shape, 0)

    def is_known(self, shape: Shape) -> bool:
        """Whether the shape has run or was tried."""
        return shape in self._seconds

    def of(self, shape: Shape) -> float:
        """Seconds of a round.  Something must be known."""
        known = self._known(shape)
        if known is not None:
            # Of what was tried and has not run, the least is taken off that others took more when they ran: where the host is
            # slower than the device, it is slower for cheap rounds than for others.
            late = self._surprise.values() if self.runs(shape) == 0 else ()
            return known + max(0.0, min(late, default=0.0))
        if shape not in self._guesses:
            self._guesses[shape] = self._guess(shape) - self._drift
        return max(1e-9, self._guesses[shape] + self._drift)

    def _guess(self, shape: Shape) -> float:
        """Seconds of a shape of which nothing is known."""
        if self.like is not None and self.like.is_known(shape):
            both = [other for other in self._seconds if self.like.is_known(other)]
            if both:
                return self.like.of(shape) * sum(map(self.of, both)) / sum(map(self.like.of, both))
        levels, nodes = (shape.max_steps, shape.num_draft_tokens) if shape else (0, 1)
        return self._chain(levels) + max(0, nodes - levels - 1) * self._node()

    def _known(self, shape: Shape) -> float | None:
        if shape not in self._seconds:
            return None
        return max(1e-9, self._seconds[shape] + self._drift - self._drift_at[shape])

    def _chain(self, levels: int) -> float:
        """Seconds of a chain of so many levels, on the line through the nearest two that are known."""
        chains = ((shape.max_steps if shape else 0, shape) for shape in self._seconds if shape is None or shape.topk == 1)
        known = {depth: self.of(shape) for depth, shape in chains}
        if not known:
            return min(self.of(shape) for shape in self._seconds)
        if levels in known or len(known) == 1:
            return known.get(levels, next(iter(known.values())))
        near, other = sorted(sorted(known, key=lambda depth: (abs(depth - levels), depth))[:2])
        slope = max(0.0, known[other] - known[near]) / (other - near)
        return max(1e-9, known[near] + (levels - near) * slope)

    def _node(self) -> float:
        """What each node costs that a tree has more than a chain as deep."""
        found = [
            (self.of(shape) - self._chain(shape.max_steps)) / more
            for shape in self._seconds
            if shape is not None and shape.topk > 1 and (more := shape.num_draft_tokens - shape.max_steps - 1) > 0
        ]
        return max(0.0, min(found, default=0.0))
