"""How many tokens a round of each shape is expected to emit, from what verified rounds accepted lately.

The estimate has few numbers, so that few rounds tell much.  Each level has a probability with which a chain's draft token is
accepted, given that the level above it was.  A tree offers several tokens a level: the odds of a level grow with the nodes that
the tree has for each node of a chain, and one number, `branching`, says how fast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from specdec.config import SpecConfig

# An observation counts 1/e after so many later ones, and after so many later rounds at least.  One row of one round is one.
MEMORY, MEMORY_ROUNDS = 200.0, 6.0
FIRST_GUESS = 0.7  # what the first level is assumed to accept before the first observation; other levels: as the one before it
GUESS_WEIGHT = 2.0  # how many observations such an assumption is worth
BRANCHING, MOST_BRANCHING = 0.85, 2.0  # trees of EAGLE-2's kind accept so; the first is assumed, the second is the limit
BRANCHING_MEMORY, BRANCHING_WEIGHT = 2000.0, 10.0  # how slowly `branching` is forgotten, and what the assumption is worth


class Acceptance:
    """Estimates for the levels 1 to `levels`; entry d of a list is for level d + 1.

    reached, accepted: fading counts of rows whose drafts reached a level, and of those accepted there, as a
        chain's would have been.
    """

    def __init__(self, levels: int) -> None:
        self.reached, self.accepted = [0.0] * levels, [0.0] * levels
        self.branching, self._branching_information = BRANCHING, BRANCHING_WEIGHT

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
        x, levels = width(shape), len(self.reached)
        expected = self.of(shape) if x else []
        fade = math.exp(-len(accepted) / max(MEMORY, MEMORY_ROUNDS * len(accepted)))
        first = accepted if best is None else [a for a, _ in best]
        taken = _above(first, levels)
        ends = [shape.max_steps] * len(first) if best is None else [length for _, length in best]
        unasked = [0] * (levels + 1)  # rows that accepted all that a chain would have drafted, by how much that was
        for a, end in zip(first, ends, strict=True):
            unasked[a] += a == end
        for level, (above, here) in enumerate(pairwise((len(first), *taken))):
            self.reached[level] = self.reached[level] * fade + above - unasked[level]
            self.accepted[level] = self.accepted[level] * fade + here
        if not x:
            return
        surprise, information, reached = 0.0, 0.0, len(accepted)
        for probability, taken_here in zip(expected, _above(accepted, shape.max_steps), strict=True):
            surprise += (taken_here - reached * probability) * x
            information += reached * probability * (1 - probability) * x * x
            reached = taken_here
        self._branching_information *= math.exp(-len(accepted) / BRANCHING_MEMORY)
        self._branching_information = max(BRANCHING_WEIGHT, self._branching_information) + information
        self.branching = min(MOST_BRANCHING, max(0.0, self.branching + surprise / self._branching_information))

    def _shifted(self, chain: Sequence[float], shape: SpecConfig) -> list[float]:
        """The probabilities of a chain's levels, with the odds that the shape's width makes of them."""
        if shape.topk == 1:
            return list(chain)
        odds = math.exp(self.branching * width(shape))
        return [probability * odds / (probability * odds + 1 - probability) for probability in chain]

    def trust(self, most: float) -> None:
        """From now on what was observed counts as so many observations a level at most: the text has moved on since."""
        for level, reached in enumerate(self.reached):
            if reached > most:
                self.reached[level], self.accepted[level] = most, self.accepted[level] * most / reached


def width(shape: SpecConfig) -> float:
    """How wide a shape is: the logarithm of its nodes over those of a chain as deep; 0 for a chain."""
    return 0.0 if shape.topk == 1 else max(0.0, math.log(shape.num_draft_tokens / (shape.max_steps + 1)))


def _above(counts: Sequence[int], levels: int) -> list[int]:
    """How many of the counts are above 0, above 1, ..., above levels - 1."""
    found = [0] * (levels + 1)
    for count in counts:
        found[count] += 1
    return list(accumulate(reversed(found[1:])))[::-1]
