"""Simulated rounds: known costs and known acceptance in place of a device, to see what the controller makes of them.

Seconds are those of an 8B target on an H200, roughly.  Tokens are counted by expectation, so that luck does not blur a rate.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from specdec.config import SpecConfig
from specdec.engine.speculation import Speculation
from specdec.generation import Emitted
from specdec.steps import CatchUp, Needs, RunRound, Step, Try

Shape = SpecConfig | None
CAPTURE_SECONDS = 0.15


@dataclass(frozen=True)
class Text:
    """How drafts fare: a chain's level is accepted with this probability, given that the one above it was.

    branches: what the nodes that a tree has more than a chain are worth; 0: nothing.
    """

    probability: float
    branches: float = 0.0

    @classmethod
    def of(cls, tau: float, branches: float = 0.0) -> Text:
        """A text in which a chain of 7 levels emits tau tokens a round."""
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if sum(middle**level for level in range(8)) < tau else (low, middle)
        return cls(low, branches)

    def level(self, shape: SpecConfig) -> float:
        more = 0.0 if shape.topk == 1 else shape.num_draft_tokens / (shape.max_steps + 1) - 1
        return float(1 - (1 - self.probability) ** (1 + self.branches * more))

    def accept_length(self, shape: Shape) -> float:
        return 1.0 if shape is None else sum(self.level(shape) ** level for level in range(shape.max_steps + 1))

    def accept(self, shape: Shape, rng: random.Random) -> tuple[int, tuple[int, int]]:
        """Draft tokens accepted in one row, and what `Emitted.best` says of it."""
        if shape is None or self.probability <= 0:
            return 0, (0, 0 if shape is None else 1)
        level = self.level(shape)
        most = shape.max_steps if level >= 1 else int(math.log(1 - rng.random()) / math.log(level))
        accepted, best = min(most, shape.max_steps), 0
        while best < accepted and rng.random() * level < self.probability:
            best += 1
        return accepted, (best, min(shape.max_steps, best + 1) if shape.topk > 1 else shape.max_steps)

    def draw(self, shape: Shape, rng: random.Random) -> tuple[int, tuple[int, int], int]:
        """The same, and how many of them came from other sources."""
        return *self.accept(shape, rng), 0


@dataclass(frozen=True)
class MatchedText(Text):
    """A text that other sources than the drafter know too: their path's first token is right with the probability `first`, and
    every later one with `goes_on`.
    """

    first: float = 0.0
    goes_on: float = 0.0

    def accept_length(self, shape: Shape) -> float:
        if shape is None:
            return 1.0
        own = [self.level(shape) ** depth if depth <= shape.max_steps else 0.0 for depth in range(1, shape.levels + 1)]
        return 1 + sum(1 - (1 - p) * (1 - self.first * self.goes_on**depth) for depth, p in enumerate(own))

    def draw(self, shape: Shape, rng: random.Random) -> tuple[int, tuple[int, int], int]:
        (accepted, best), matched = self.accept(shape, rng), 0
        while shape and matched < shape.levels and rng.random() < (self.goes_on if matched else self.first):
            matched += 1
        return max(accepted, matched), best, matched


def cost(rows: int, shape: Shape) -> float:
    """Seconds of a round."""
    levels, nodes = (shape.max_steps, shape.num_draft_tokens) if shape else (0, 1)
    drafting = levels * (0.18 + 0.002 * rows) + 0.2 if levels else 0.02
    return 1e-3 * (4.4 + 0.03 * rows + drafting + 0.0165 * rows * nodes)


def plain_cost(rows: int) -> float:
    """Seconds of a round without a drafter, which keeps nothing for one."""
    return cost(rows, None) - 2e-5


# Milliseconds of a round of an 8B target on one H200 by rows: of no levels, chains by levels, trees by label.  Some of them
# were interpolated.  A width at which a product takes another kernel makes steps, so no line goes through them.
H200: dict[int, dict[Shape, float]] = {
    rows: {
        None: plain,
        **{SpecConfig(levels, 1): ms for levels, ms in zip((1, 2, 3, 4, 5, 7, 10), chains, strict=True)},
        **{
            SpecConfig(*shape): ms
            for shape, ms in zip(((3, 4, 16), (5, 4, 16), (7, 4, 16), (3, 2, 8), (5, 2, 8)), trees, strict=True)
        },
    }
    for rows, plain, chains, trees in (
        (1, 3.95, (4.28, 4.54, 4.74, 4.92, 5.11, 5.50, 6.15), (4.95, 5.29, 5.75, 4.85, 5.22)),
        (8, 4.28, (4.62, 4.91, 5.13, 5.55, 5.96, 6.36, 7.58), (6.6, 6.92, 7.4, 5.45, 6.05)),
        (32, 5.29, (5.82, 6.75, 7.08, 8.3, 8.64, 10.0, 12.6), (13.4, 14.0, 14.7, 9.4, 9.9)),
    )
}
A_TOKEN = 3.5e-8  # seconds that a round takes longer for each token of all rows
LONGEST = 900  # tokens of a text, after which the next one begins


def on_h200(rows: int, shape: Shape) -> float:
    """Seconds of a round, of rows without tokens."""
    return 1e-3 * H200[rows][shape]


def on_cpu(rows: int, shape: Shape) -> float:
    """Seconds of a round of a small pair on one core of a CPU, roughly: nodes are not free, and a tree's draft is dear."""
    levels, nodes = (shape.max_steps, shape.num_draft_tokens) if shape else (0, 1)
    width = shape.topk if shape else 0
    verify = 14.4 + 0.4 * rows * nodes + 0.6 * max(0, rows * nodes - 4)
    draft = 2.0 + levels * (0.9 + 0.15 * rows * width) if shape else 0.0
    return 1e-3 * (verify + draft)


@dataclass
class SimulatedDevice:
    """A device that runs what `speculation` asks for; a round's result is known one launch later.

    cost: seconds of a round.  a_token: how much longer a round takes for each token of all rows; texts grow, and begin anew.
    uneven: how much rounds differ, as a share.  needs: of all rows.
    length: tokens of each text.  rounds: by shape.  seconds, tokens: so far.
    """

    speculation: Speculation
    seed: int = 0
    cost: Callable[[int, Shape], float] = cost
    a_token: float = 0.0
    uneven: float = 0.02
    needs: Needs = field(default_factory=Needs)
    length: float = 0.0
    rounds: Counter[Shape] = field(default_factory=Counter)
    seconds: float = 0.0
    tokens: float = 0.0
    shapes: list[Shape] = field(default_factory=list)
    _late: deque[tuple[RunRound, float, list[tuple[int, tuple[int, int], int]]]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def run(self, rows: int, rounds: int, text: Text) -> float:
        """Runs rounds; their tokens a second."""
        seconds, tokens = self.seconds, self.tokens
        for _ in range(rounds):
            self.round(rows, text)
        return (self.tokens - tokens) / (self.seconds - seconds)

    def round(self, rows: int, text: Text) -> Shape:
        """One round; its shape."""
        known = int(rows * self.length)
        before, step = self.speculation.next_round(rows, self.needs, False, 1.0, known)
        self.prepare(before)
        seconds = (self.cost(rows, step.spec) + self.a_token * known) * (1 + self.uneven * self.rng.random())
        self.seconds += seconds
        emitted = text.accept_length(step.spec)
        self.tokens += rows * emitted
        self.length = (self.length + emitted) % LONGEST
        self.rounds[step.spec] += 1
        self.shapes.append(step.spec)
        self._late.append((step, seconds, known, [text.draw(step.spec, self.rng) for _ in range(rows)]))
        if len(self._late) > 1:
            run, took, tokens, done = self._late.popleft()
            told = [Emitted([0] * (a + 1), best, [2] * by_others + [1] * (a - by_others)) for a, best, by_others in done]
            self.speculation.observe(run, took, told, tokens)
        return step.spec

    def prepare(self, steps: list[Step]) -> None:
        """Runs what comes before a round."""
        for step in steps:
            if isinstance(step, CatchUp):
                self.seconds += 3e-4 + 3e-5 * step.rows
            elif isinstance(step, Try):
                self.seconds += CAPTURE_SECONDS
                if isinstance(step.step, RunRound):
                    self.speculation.tried(step, self.cost(step.step.rows, step.step.spec))


@dataclass
class Busy(SimulatedDevice):
    """A machine on which other programs run: rounds take up to four times as long for a while.

    busy: the share of these whiles.  calm: seconds that all rounds and passes would have taken without them.
    """

    busy: float = 0.0
    calm: float = 0.0
    _slower: float = 1.0
    _left: int = 0

    def round(self, rows: int, text: Text) -> Shape:
        if self._left == 0:
            self._left = self.rng.randint(3, 60)
            self._slower = self.rng.uniform(1.2, 4.0) if self.rng.random() < self.busy else 1.0
        self._left -= 1
        calm = self.cost
        self.cost = lambda rows, shape: self._slower * calm(rows, shape)
        shape = super().round(rows, text)
        self.cost = calm
        self.calm += calm(rows, shape)
        return shape

    def prepare(self, steps: list[Step]) -> None:
        before = self.seconds
        super().prepare(steps)
        self.calm += self.seconds - before


def best_rate(rows: int, text: Text, shapes: tuple[SpecConfig, ...]) -> float:
    """Tokens a second of plain decoding or of the best fixed shape, whichever is more."""
    plain = rows / plain_cost(rows)
    return max(plain, *(rows * text.accept_length(shape) / cost(rows, shape) for shape in shapes)) / 1.01  # the noise's mean


def best_on_h200(rows: int, text: Text) -> float:
    """The same by the table, with texts of half their greatest length."""
    known = A_TOKEN * rows * LONGEST / 2
    return max(rows * text.accept_length(shape) / (on_h200(rows, shape) + known) for shape in H200[rows])
