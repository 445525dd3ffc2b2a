"""How many tokens of which prompts the next chunk holds, under a budget.  Knows counts only.

A token costs 1, plus what its attention costs: it reads every token before it, so a token at position p costs
1 + p / `doubling`, where `doubling` is the context at which attention has doubled a token's cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

FAIR_SHARE = 4  # the prompt that has waited longest gets at least 1/4 of a chunk, so that short prompts can't starve a long one
# A chunk that leaves tokens for later is cut to a multiple of the largest of these that it holds: products compute tiles of 128
# or 256 rows, and the rest of a tile takes as long as a whole one.
GRANULES = (256, 128)


class Left(NamedTuple):
    """What is left of a prompt: `tokens` tokens from position `start` on."""

    start: int
    tokens: int


@dataclass(frozen=True)
class ChunkBudget:
    """beside_rounds: what a chunk may cost between two rounds of running rows.

    alone: what it may cost while no row runs.  whole_prompts: the same, if the chunk consists of whole prompts: parts of longer
    ones do not fill it further than to `alone`, so that a short prompt that comes next does not wait for long.
    most: the most tokens of one prompt in one chunk.  doubling: see the top of this file.
    """

    beside_rounds: int
    alone: int
    whole_prompts: int
    doubling: float = math.inf
    most: int | None = None

    def cost(self, start: int, count: int) -> float:
        """Of `tokens` tokens from position `start` on."""
        return count * (1 + (start + count / 2) / self.doubling)

    def affordable(self, left: Left, budget: float) -> int:
        """How many of a prompt's next tokens the budget pays for."""
        low, high = 0, left.tokens if self.most is None else min(left.tokens, self.most)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.cost(left.start, middle) <= budget else (low, middle - 1)
        return low

    def share(self, prompts: Sequence[Left], rows_run: bool) -> list[int]:
        """Tokens of each prompt (in order of arrival) in the next chunk; 0 of those that wait.  At least one in all.

        The prompts that have least left come first, so that the first token of a short prompt does not wait for a long one.
        Before them, the prompt that arrived first gets its fair share.
        """
        shares, spent = [0] * len(prompts), 0.0
        for_parts = self.beside_rounds if rows_run else self.alone
        for_whole = self.beside_rounds if rows_run else self.whole_prompts
        by_cost = sorted(range(len(prompts)), key=lambda i: self.cost(*prompts[i]))
        if by_cost[0] != 0:
            shares[0] = self.affordable(prompts[0], for_parts / FAIR_SHARE)
            spent = self.cost(prompts[0].start, shares[0])
        for index in by_cost:
            start, count = prompts[index].start + shares[index], prompts[index].tokens - shares[index]
            if spent + self.cost(start, count) <= for_whole and (self.most is None or prompts[index].tokens <= self.most):
                shares[index] = prompts[index].tokens
                spent += self.cost(start, count)
                continue
            most = count if self.most is None else min(count, self.most - shares[index])
            part = self.affordable(Left(start, most), for_parts - spent)
            shares[index] += part
            spent += self.cost(start, part)
        if not any(shares):
            shares[by_cost[0]] = 1
        return self._trimmed(prompts, shares)

    def _trimmed(self, prompts: Sequence[Left], shares: list[int]) -> list[int]:
        """Cuts the longest part that does not end its prompt, so that the chunk's size is a multiple of a granule."""
        parts = [i for i, (left, count) in enumerate(zip(prompts, shares, strict=True)) if 0 < count < left.tokens]
        granule = next((granule for granule in GRANULES if granule <= sum(shares)), 1)
        if parts:
            longest = max(parts, key=lambda i: shares[i])
            shares[longest] -= min(sum(shares) % granule, shares[longest] - 1)
        return shares
