"""How far texts follow the paths of other sources than the drafter: what these add to a round, as rounds have shown.

Paths hold on where a drafter gives out, so they have an estimate for each depth, as a chain has; both go on independently of
each other.  This module knows numbers and the shapes of trees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from specdec.config import SpecConfig

# What a drafter's levels (acceptance.py) and paths have in common.
# An observation counts 1/e after so many later ones, and after so many later rounds at least.  One row of one round is one.
MEMORY, MEMORY_ROUNDS = 300.0, 6.0
# Another depth is assumed to accept as those above it, which is worth so many observations; and how many all depths above are
# worth against the depth itself, in the assumption for the next one.
GUESS_WEIGHT, NEIGHBOUR_WEIGHT = 3.0, 12.0
DOUBT = 0.7  # standard deviations that an optimist adds to what is not known well
MAX_PROBABILITY = 0.999  # no probability is taken to be higher

# Chosen between what texts as they are and edits showed: benchmarks/sources/README.md, "First estimates".
FIRST, NEXT = 0.25, 0.85  # what the first token of a path is assumed to accept, and the next one where it was right
PREDICTED = 0.75  # the first, where requests bring predictions


class LevelRates:
    """reached, accepted: fading counts of rows that reached each level, and of those that went on there.

    first: what the first level is assumed to accept, which is worth so many observations (`weight`).  next: what the second
    one is; None: what the first has shown.
    """

    def __init__(self, levels: int, first: float, weight: float = GUESS_WEIGHT, next: float | None = None) -> None:
        self.first, self.weight, self.next = first, weight, next
        self.reached, self.accepted = [0.0] * levels, [0.0] * levels

    def add(self, reached: Sequence[int], accepted: Sequence[int], rows: int, rounds: int) -> None:
        """Counts of so many rounds, which had so many rows together."""
        fade = math.exp(-rows / max(MEMORY, MEMORY_ROUNDS * rows / rounds))
        self.reached = [before * fade + more for before, more in zip(self.reached, reached, strict=True)]
        self.accepted = [before * fade + more for before, more in zip(self.accepted, accepted, strict=True)]

    def rates(self, levels: int, known: int | None = None) -> list[float]:
        """The probability with which each level is accepted, given that the one above it was.

        known: levels below this one are taken as high as they may well be; None: no level is.
        """
        found, guess, worth = list[float](), self.first, self.weight
        for level, (reached, accepted) in enumerate(zip(self.reached[:levels], self.accepted[:levels], strict=True)):
            weight = reached + worth
            rate = (accepted + worth * guess) / weight
            shown = (accepted + NEIGHBOUR_WEIGHT * guess) / (reached + NEIGHBOUR_WEIGHT) if level else self.next
            guess, worth = rate if shown is None else shown, GUESS_WEIGHT
            if known is not None and level >= known:
                rate = min(MAX_PROBABILITY, rate + DOUBT * math.sqrt(rate * (1 - rate) / weight))
            found.append(rate)
        return found


class PathRates(LevelRates):
    """Of texts that went along such paths, by depth."""

    def __init__(self, levels: int, first: float = FIRST) -> None:
        super().__init__(levels, first, next=NEXT)

    def observe(self, shape: SpecConfig, matched: Sequence[int], rounds: int = 1) -> None:
        """matched: for each row that speculates, how many tokens from the root on such paths had right, in so many rounds.

        A path that was right as deep as the shape's reach tells nothing of what is deeper.  Nor does a tree without spare nodes
        tell of paths: its few nodes may all be the drafter's.  What is known grows old meanwhile.
        """
        room = min(shape.levels, shape.num_draft_tokens - 1) if shape.spare_nodes else 0
        tried, right = [0] * len(self.reached), [0] * len(self.reached)
        for depth in range(min(room, len(self.reached))):
            tried[depth], right[depth] = sum(count >= depth for count in matched), sum(count > depth for count in matched)
        self.add(tried, right, len(matched), rounds)

    def joined(self, chain: Sequence[float], shape: SpecConfig, known: int | None = None) -> float:
        """Tokens of a round, the bonus token included.  chain: how likely the levels of the drafter are, by level."""
        depths = min(shape.levels, shape.num_draft_tokens - 1)
        of_paths = list(accumulate(self.rates(depths, known), mul))
        of_drafter = [*accumulate(chain, mul), *[0.0] * depths][:depths]
        return 1 + sum(1 - (1 - p) * (1 - q) for p, q in zip(of_drafter, of_paths, strict=True))


def known_depths(shape: SpecConfig | None) -> int | None:
    """Of how many depths of paths rounds of the shape that runs tell; None: of all, as far as anybody knows."""
    return None if shape is None else shape.levels if shape.spare_nodes else 0


def matched(sources: Sequence[int]) -> int:
    """How many of the first accepted tokens others than the drafter, whose bit is 1, proposed.  sources: see Emitted."""
    return next((place for place, bits in enumerate(sources) if bits < 2), len(sources))
