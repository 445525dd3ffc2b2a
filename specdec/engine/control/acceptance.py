"""How many tokens a round of each shape is expected to emit, from what verified rounds accepted lately.

The estimate has few numbers, so that few rounds tell much.  Each level has a probability with which a chain's draft token is
accepted, given that the level above it was.  A tree offers several tokens a level: the odds of a level grow with the nodes that
the tree has for each node of a chain, and one number, `branching`, says how fast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.config import SpecConfig

# An observation counts 1/e after so many later ones, and after so many later rounds at least.  One row of one round is one.
MEMORY, MEMORY_ROUNDS = 200.0, 6.0
FIRST_GUESS = 0.7  # what the first level is assumed to accept before the first observation; other levels: as the one before it
GUESS_WEIGHT = 2.0  # how many observations such an assumption is worth
BRANCHING, MOST_BRANCHING = 0.85, 2.0  # trees of EAGLE-2's kind accept so; the first is assumed, the second is the limit
BRANCHING_MEMORY, BRANCHING_WEIGHT = 2000.0, 10.0  # how slowly `branching` is forgotten, and what the assumption is worth


@dataclass
class Branching:
    """How the odds of a level grow with the width of trees: as e**(value * width).  information: how well that is known."""

    value: float = BRANCHING
    information: float = BRANCHING_WEIGHT

    def odds(self, x: float) -> float:
        """What the odds are multiplied by in a tree of width x."""
        return math.exp(self.value * x)

    def learn(self, x: float, chain: Sequence[float], refused: Sequence[int], rescued: Sequence[int], fade: float) -> None:
        """Records, for each level of trees of width x, how many first choices were refused, and for how many of these another
        token of the level was accepted.  chain: the probabilities of first choices.
        """
        surprise = information = 0.0
        odds = self.odds(x)
        for p, tried, found in zip(chain, refused, rescued, strict=True):
            if not tried:
                continue
            p = min(0.999, max(0.001, p))
            whole = p * odds + 1 - p
            expected = min(0.999, max(0.001, p * (odds - 1) / whole))  # that another token is accepted if the first is not
            slope = x * p * odds / whole**2
            surprise += (found - tried * expected) * slope / (expected * (1 - expected))
            information += tried * slope**2 / (expected * (1 - expected))
        self.information = max(BRANCHING_WEIGHT, self.information * fade) + information
        self.value = min(MOST_BRANCHING, max(0.0, self.value + surprise / self.information))


class Acceptance:
    """Estimates for the levels 1 to `levels`; entry d of a list is for level d + 1.

    reached, accepted: fading counts of rows whose drafts reached a level, and of those accepted there, as a chain's would have
        been.
    branching: of all trees; and of each shape, where it has run.
    """

    def __init__(self, levels: int) -> None:
        self.reached, self.accepted = [0.0] * levels, [0.0] * levels
        self.branching = Branching()
        self._own = dict[SpecConfig, Branching]()
        self._widths = dict[SpecConfig, float]()

    def of_chain(self, levels: int) -> list[float]:
        """The probability with which each level of a chain is accepted, given that the one above it was."""
        found, guess = list[float](), FIRST_GUESS
        for reached, accepted in zip(self.reached[:levels], self.accepted[:levels], strict=True):
            guess = (accepted + GUESS_WEIGHT * guess) / (reached + GUESS_WEIGHT)
            found.append(guess)
        return found

    def of(self, shape: SpecConfig) -> list[float]:
        """The same of a shape."""
        return self._shifted(self.of_chain(shape.max_steps), shape)

    def accept_lengths(self, shapes: Sequence[SpecConfig | None]) -> list[float]:
        """The tokens that a round of each shape emits in a row that speculates, the bonus token included.

        None: a round of no levels.
        """
        chain, found = self.of_chain(len(self.reached)), list[float]()
        for shape in shapes:
            total, reach = 1.0, 1.0
            for probability in self._shifted(chain[: shape.max_steps], shape) if shape else ():
                reach *= probability
                total += reach
            found.append(total)
        return found

    def observe(self, shape: SpecConfig, accepted: Sequence[int], best: Sequence[tuple[int, int]] | None = None) -> None:
        """Records how many draft tokens each row that speculates accepted in a verified round.

        best: for each row, how many tokens of the drafter's first choices were accepted, and how many the tree had: what a
        chain would have drafted.  None for a chain.
        """
        fade = math.exp(-len(accepted) / max(MEMORY, MEMORY_ROUNDS * len(accepted)))
        if best is None:
            best = [(a, shape.max_steps) for a in accepted]
        levels = len(self.reached)
        refused, rescued, ended = [0] * (levels + 1), [0] * levels, [0] * (levels + 1)
        for a, (first, length) in zip(accepted, best, strict=True):
            if first == length:
                ended[first] += 1
            else:
                refused[first] += 1
                rescued[first] += a > first
        reached = len(accepted)
        for level in range(levels):
            reached -= ended[level]
            taken = reached - refused[level]
            self.reached[level] = self.reached[level] * fade + reached
            self.accepted[level] = self.accepted[level] * fade + taken
            reached = taken
        if shape.topk > 1 and (x := self._width(shape)):
            own = self._own.setdefault(shape, Branching(self.branching.value))
            chain, slow = self.of_chain(levels), math.exp(-len(accepted) / BRANCHING_MEMORY)
            for each in (own, self.branching):
                each.learn(x, chain, refused[:levels], rescued, slow)

    def _shifted(self, chain: Sequence[float], shape: SpecConfig) -> list[float]:
        """The probabilities of a chain's levels, with the odds that the shape's width makes of them."""
        if shape.topk == 1:
            return list(chain)
        x, value = self._width(shape), self.branching.value
        if own := self._own.get(shape):
            known = own.information - BRANCHING_WEIGHT
            value += (own.value - value) * known / (known + BRANCHING_WEIGHT)
        odds = math.exp(value * x)
        return [probability * odds / (probability * odds + 1 - probability) for probability in chain]

    def _width(self, shape: SpecConfig) -> float:
        if shape not in self._widths:
            self._widths[shape] = width(shape)
        return self._widths[shape]

    def trust(self, most: float) -> None:
        """From now on what was observed counts as so many observations a level at most: the text has moved on since."""
        for level, reached in enumerate(self.reached):
            if reached > most:
                self.reached[level], self.accepted[level] = most, self.accepted[level] * most / reached


def width(shape: SpecConfig) -> float:
    """How wide a shape is: the logarithm of its nodes over those of a chain as deep; 0 for a chain."""
    return 0.0 if shape.topk == 1 else max(0.0, math.log(shape.num_draft_tokens / (shape.max_steps + 1)))
