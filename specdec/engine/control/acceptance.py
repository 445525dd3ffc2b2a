"""How many tokens a round of each shape is expected to emit, from what verified rounds accepted lately.

The estimate has few numbers, so that few rounds tell much.  Each level has a probability with which a chain's draft token is
accepted, given that the level above it was.  A tree offers several tokens a level: the odds of a level grow with the nodes that
the tree has for each node of a chain, and one number, `branching`, says how fast.  What other sources of a tree add is in
`path_rates.py`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from specdec.config import SpecConfig
from specdec.engine.control.path_rates import DOUBT, FIRST, LevelRates, PathRates, known_depths

# The last rounds are also kept apart, in blocks of at least so many observations and two rounds.  If the last blocks together
# are more than so many standard deviations from what older rounds promise, and there are so many observations of both at least,
# the text has changed, and what is older than these blocks is forgotten.
BLOCK, WINDOWS, CHANGED, MIN_OBSERVATIONS = 8, (1, 2, 3, 4, 6, 8, 12), 3.2, 8
# What the first level is assumed to accept where nobody has looked at the drafter, and how many observations that is worth.
FIRST_GUESS, FIRST_WEIGHT = 0.7, 0.1
BRANCHING, MAX_BRANCHING = 0.85, 2.0  # trees of EAGLE-2's kind accept so; the first is assumed, the second is the limit
# How slowly `branching` is forgotten, in observations and in rounds at least, and what the assumption is worth.
BRANCHING_MEMORY, BRANCHING_ROUNDS, BRANCHING_WEIGHT = 1000.0, 250.0, 10.0
CHECK_WEIGHT = 20.0  # accepted tokens that the assumption is worth that a tree accepts what its levels promise


@dataclass
class Branching:
    """How the odds of a level grow with the width of trees: as e**(value * width).  information: how well that is known."""

    value: float = BRANCHING
    information: float = BRANCHING_WEIGHT

    def learn(self, x: float, chain: Sequence[float], refused: Sequence[int], rescued: Sequence[int]) -> None:
        """Records, for each level of trees of width x, how many first choices were refused, and for how many of these another
        token of the level was accepted.  chain: the probabilities of first choices.
        """
        surprise = information = 0.0
        odds = math.exp(self.value * x)
        for p, tried, found in zip(chain, refused, rescued, strict=True):
            if not tried:
                continue
            p = min(0.999, max(0.001, p))
            whole = p * odds + 1 - p
            expected = min(0.999, max(0.001, p * (odds - 1) / whole))  # that another token is accepted if the first is not
            slope = x * p * odds / whole**2
            surprise += (found - tried * expected) * slope / (expected * (1 - expected))
            information += tried * slope**2 / (expected * (1 - expected))
        self.information += information
        self.value = min(MAX_BRANCHING, max(0.0, self.value + surprise / self.information))


class LevelSums(NamedTuple):
    """Of all rounds up to one: for each level, how many rows reached it, and how many of these accepted there."""

    reached: list[int]
    accepted: list[int]


class Acceptance(LevelRates):
    """Estimates for the levels 1 to `levels`; entry d of a list is for level d + 1.

    Its counts and rates are those of drafts that a chain would have had.
    branching: of all trees; and of each shape, where it has run.
    first_guess: what the first level is assumed to accept; None: nobody has looked at the drafter.
    depths: how deep paths of other sources reach; 0: there are none.  first_match: what their first token is assumed to accept.
    """

    def __init__(
        self, levels: int, first_guess: float | None = None, depths: int = 0, first_match: float = FIRST
    ) -> None:  # fmt: skip
        super().__init__(levels, FIRST_GUESS if first_guess is None else first_guess, FIRST_WEIGHT)
        self.matches = PathRates(depths, first_match)
        self._sums = LevelSums([0] * levels, [0] * levels)  # of all rounds, none of them forgotten
        self._marks = deque([self._copied()], maxlen=WINDOWS[-1] + 1)  # these, at the ends of the last blocks
        self._since = 0  # observations since the last of them
        self.branching = Branching()
        self._own = dict[SpecConfig, Branching]()
        self._kept = dict[SpecConfig | None, tuple[float, float]]()  # what trees accepted and promised; None: all of them

    def accept_lengths(self, shapes: Sequence[SpecConfig | None], runs: SpecConfig | None = None) -> list[float]:
        """The tokens that a round of each shape emits in a row that speculates, the bonus token included.

        shapes: None is a round of no levels.  runs: the shape that runs; what its rounds do not tell is taken to be as good as
        it may well be, so that other shapes are tried.  None: everything is taken as it is expected to be.
        """
        chain = self.rates(len(self.reached), runs.max_steps if runs else None)
        of_chains = _tokens(chain)
        doubts = runs is not None and runs.topk == 1
        found = list[float]()
        for shape in shapes:
            if shape is None or shape.is_chain:
                found.append(of_chains[shape.max_steps if shape else 0])
            else:
                more = self._expected(shape, chain[: shape.max_steps], doubts, known_depths(runs)) - 1
                found.append(1 + self._honest(shape, doubts) * more)
        return found

    def observe(
        self,
        shape: SpecConfig,
        accepted: Sequence[int],
        best: Sequence[tuple[int, int]] | None = None,
        rounds: int = 1,
        matched: Sequence[int] | None = None,
    ) -> None:
        """Records how many draft tokens each row that speculates accepted, in so many verified rounds with trees of a shape.

        best: for each row, how many tokens of the drafter's first choices were accepted, and how many the tree had: what a
        chain would have drafted.  None for a chain.  matched: see PathRates.observe; None where there are no other sources.
        """
        rows = len(accepted) / rounds
        if not shape.is_chain:
            self._check(shape, accepted)
        if matched is not None:
            self.matches.observe(shape, matched, rounds)
        S = shape.max_steps
        best = [(min(a, S), min(length, S)) for a, length in best] if best is not None else [(a, S) for a in accepted]
        levels = len(self.reached)
        refused, rescued, ended = [0] * (levels + 1), [0] * levels, [0] * (levels + 1)
        tried, taken = [0] * levels, [0] * levels
        for a, (first, length) in zip(accepted, best, strict=True):
            if first == length:
                ended[first] += 1
            else:
                refused[first] += 1
                rescued[first] += a > first
        reached = len(accepted)
        for level in range(levels):
            tried[level] = reached - ended[level]
            taken[level] = reached = tried[level] - refused[level]
            self._sums.reached[level] += tried[level]
            self._sums.accepted[level] += taken[level]
        self.add(tried, taken, len(accepted), rounds)
        self._since += len(accepted)
        if self._since >= max(BLOCK, 2 * rows):
            self._since = 0
            self._drop_what_is_over()
            self._marks.append(self._copied())
        self._age(len(accepted), rows)
        if x := width(shape):
            own = self._own.setdefault(shape, Branching(self.branching.value))
            chain = self.rates(levels)
            for each in (own, self.branching):
                each.learn(x, chain, refused[:levels], rescued)

    def _age(self, observations: int, rows: float) -> None:
        """What is known of trees grows old, whatever runs.  rows: that speculate in a round."""
        slow = math.exp(-observations / max(BRANCHING_MEMORY, BRANCHING_ROUNDS * rows))
        for each in (self.branching, *self._own.values()):
            each.information = max(BRANCHING_WEIGHT, each.information * slow)
        for name, (got, promised) in self._kept.items():
            self._kept[name] = got * slow, promised * slow

    def _check(self, shape: SpecConfig, accepted: Sequence[int]) -> None:
        """Records what rounds with a tree accepted, beside what they were expected to."""
        promised = len(accepted) * (self._expected(shape, self.rates(shape.max_steps)) - 1)
        for name in (shape, None):
            got, before = self._kept.get(name, (0.0, 0.0))
            self._kept[name] = got + sum(accepted), before + promised

    def _honest(self, shape: SpecConfig, doubts: bool) -> float:
        """How many times what its levels promise a tree accepts.  Paths that end early for want of nodes are those that the
        drafter trusts least, so levels look better than they are.  doubts: whether that is known too long to be sure.
        """
        of_all, promised_by_all = self._kept.get(None, (0.0, 0.0))
        usual = (of_all + CHECK_WEIGHT) / (promised_by_all + CHECK_WEIGHT)
        if doubts:
            usual = max(1.0, usual)
        got, promised = self._kept.get(shape, (0.0, 0.0))
        return (got + CHECK_WEIGHT * usual) / (promised + CHECK_WEIGHT)

    def _expected(
        self, shape: SpecConfig, chain: Sequence[float], doubts: bool = False, known: int | None = None
    ) -> float:  # fmt: skip
        """Tokens of a round by its levels alone, the bonus token included.  known: depths of paths; see PathRates.rates."""
        levels = self._shifted(chain, shape, doubts)
        return _tokens(levels)[-1] if shape.max_depth is None else self.matches.joined(levels, shape, known)

    def _copied(self) -> LevelSums:
        return LevelSums(list(self._sums.reached), list(self._sums.accepted))

    def _drop_what_is_over(self) -> None:
        """Forgets what is older than the last blocks if these show that the text has changed."""
        found, most = 0, CHANGED**2
        for blocks in WINDOWS:
            if blocks > len(self._marks):
                break
            if (apart := self._apart(self._marks[-blocks])) > most:
                found, most = blocks, apart
        if found:
            mark = self._marks[-found]
            self.reached = [float(now - then) for now, then in zip(self._sums.reached, mark.reached, strict=True)]
            self.accepted = [float(now - then) for now, then in zip(self._sums.accepted, mark.accepted, strict=True)]
            while len(self._marks) > found:
                self._marks.popleft()

    def _apart(self, mark: LevelSums) -> float:
        """How many standard deviations, squared, the rounds since a mark are from older ones: at the level with the most."""
        most = 0.0
        for level, whole in enumerate(self.reached):
            new = self._sums.reached[level] - mark.reached[level]
            older = whole - new
            if new < MIN_OBSERVATIONS:
                break  # fewer reach the levels below
            if older < MIN_OBSERVATIONS:
                continue
            hits = self._sums.accepted[level] - mark.accepted[level]
            p = min(1.0, max(0.0, (self.accepted[level] - hits) / older))
            apart = abs(hits - new * p) - 0.5
            if apart > 0:
                both = min(1 - 0.5 / whole, max(0.5 / whole, self.accepted[level] / whole))
                most = max(most, apart * apart / (new * new * both * (1 - both) * (1 / new + 1 / older)))
        return most

    def _shifted(self, chain: Sequence[float], shape: SpecConfig, doubts: bool = False) -> list[float]:
        """The probabilities of a chain's levels, with the odds that the shape's width makes of them.

        doubts: whether the width is taken to be worth as much as it may well be.
        """
        if shape.topk == 1:
            return list(chain)
        x, value = width(shape), self.branching.value
        if own := self._own.get(shape):
            known = own.information - BRANCHING_WEIGHT
            value += (own.value - value) * known / (known + BRANCHING_WEIGHT)
        if doubts:
            value = min(MAX_BRANCHING, value + DOUBT / math.sqrt((own or self.branching).information))
        odds = math.exp(value * x)
        return [probability * odds / (probability * odds + 1 - probability) for probability in chain]

    def trust(self, most: float) -> None:
        """From now on what was observed counts as so many observations a level at most: the text has moved on since."""
        for level, reached in enumerate(self.reached):
            if reached > most:
                self.reached[level], self.accepted[level] = most, self.accepted[level] * most / reached
        self._since = 0
        self._marks = deque(
            [self._copied()], self._marks.maxlen
        )  # older blocks would count for more than what they are compared with


def _tokens(chain: Sequence[float]) -> list[float]:
    """The tokens of rounds with 0, 1, ... of these levels, the bonus token included."""
    return list(accumulate(accumulate(chain, mul, initial=1.0)))


def width(shape: SpecConfig) -> float:
    """How wide a drafter's tree is: the logarithm of its nodes over those of a chain as deep; 0 for a chain."""
    return 0.0 if shape.topk == 1 else max(0.0, math.log(shape.num_draft_tokens / (shape.max_steps + 1)))
