"""Decides how many tokens of which prompts the next chunk holds, under a budget.  This module knows counts only.

A token costs 1, plus the cost of its attention.  A token reads every token before it, so a token at position p costs
1 + p / `doubling`, where `doubling` is the context length at which attention has doubled a token's cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

FAIR_SHARE = 4  # the prompt that has waited longest gets at least 1/4 of a chunk, so that short prompts can't starve a long one
# A pass that leaves tokens for later is cut to a multiple of the largest of these sizes that it reaches.  Matrix products
# compute tiles of 128 or 256 rows, and a tile that is partly filled takes as long as a whole one.
GRANULES = (256, 128)
# Capturing a chunk's graph takes as long as an eager pass, and only then does the graph run.  So between rounds of running
# rows, only chunks that cost at most a quarter of the budget are captured: the rows wait no longer for such a chunk than for a
# chunk that uses the whole budget.
CAPTURE_SHARE = 4


class PromptRest(NamedTuple):
    """The part of a prompt that has not run yet: `tokens` tokens from position `start` on."""

    start: int
    tokens: int


@dataclass(frozen=True)
class ChunkBudget:
    """What a chunk of prompts may cost.  The unit is the cost of one token at position 0.

    whole_prompts: the most that whole prompts may cost together while no row runs, or in a burst (see `is_burst`).  Parts of
        longer prompts fill a chunk no further than `alone`, so that a short prompt that arrives next does not wait for long.
    nodes: tokens of a round in the same pass.
    """

    beside_rounds: int  # the most that a chunk may cost between two rounds of running rows
    alone: int  # the most that a chunk may cost while no row runs
    whole_prompts: int
    doubling: float = math.inf  # the context length at which attention doubles a token's cost
    most: int | None = None  # tokens of one prompt in one chunk; None: no bound
    nodes: int = 0

    def cost(self, start: int, count: int) -> float:
        """The cost of `count` tokens from position `start` on."""
        return count * (1 + (start + count / 2) / self.doubling)

    def may_capture(self, cost: float, running: int) -> bool:
        """Whether there is time to capture a graph for a chunk of that cost.  running: how many rows wait for it."""
        return not running or cost <= self.beside_rounds / CAPTURE_SHARE

    def affordable(self, left: PromptRest, budget: float) -> int:
        """How many of a prompt's next tokens a chunk can hold at a cost of at most `budget`."""
        low, high = 0, left.tokens if self.most is None else min(left.tokens, self.most)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.cost(left.start, middle) <= budget else (low, middle - 1)
        return low

    def is_burst(self, prompts: Sequence[PromptRest], running: int) -> bool:
        """Whether so many short prompts wait that the rows that run had better wait for them: half as many as rows run.

        A round between two chunks then serves few rows in almost the time of a full batch.  A prompt is short if one chunk
        between two rounds holds it whole.
        """
        return 2 * sum(self.cost(*left) <= self.beside_rounds for left in prompts) >= running

    def share(self, prompts: Sequence[PromptRest], running: int) -> list[int]:
        """How many tokens of each prompt the next chunk holds.  A prompt that waits gets 0; all together get at least one.

        prompts: what is left of each, in order of arrival.  running: how many running rows wait for the chunk.

        The prompt that arrived first gets its fair share.  Then the prompts with the least left are served first, so that the
        first token of a short prompt does not wait for a long prompt.
        """
        shares, spent = [0] * len(prompts), 0.0
        for_parts = self.beside_rounds if running else self.alone
        for_short = self.whole_prompts if self.is_burst(prompts, running) else for_parts
        for_long = for_parts if running else self.whole_prompts
        by_cost = sorted(range(len(prompts)), key=lambda i: self.cost(*prompts[i]))
        if by_cost[0] != 0:
            shares[0] = self.affordable(prompts[0], for_parts / FAIR_SHARE)
            spent = self.cost(prompts[0].start, shares[0])
        for index in by_cost:
            start, count = prompts[index].start + shares[index], prompts[index].tokens - shares[index]
            for_whole = for_short if self.cost(*prompts[index]) <= self.beside_rounds else for_long
            if spent + self.cost(start, count) <= for_whole and (self.most is None or prompts[index].tokens <= self.most):
                shares[index] = prompts[index].tokens
                spent += self.cost(start, count)
                continue
            most = count if self.most is None else min(count, self.most - shares[index])
            part = self.affordable(PromptRest(start, most), for_parts - spent)
            shares[index] += part
            spent += self.cost(start, part)
        if not any(shares):
            shares[by_cost[0]] = 1
        return self._trimmed(prompts, shares)

    def _trimmed(self, prompts: Sequence[PromptRest], shares: list[int]) -> list[int]:
        """Shortens the longest part that does not end its prompt, so that the pass's tokens are a multiple of a granule."""
        parts = [i for i, (left, count) in enumerate(zip(prompts, shares, strict=True)) if 0 < count < left.tokens]
        tokens = sum(shares) + self.nodes
        granule = next((granule for granule in GRANULES if granule <= tokens), 1)
        if parts:
            longest = max(parts, key=lambda i: shares[i])
            shares[longest] -= min(tokens % granule, shares[longest] - 1)
        return shares
