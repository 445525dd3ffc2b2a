"""Decides how large the chunk is that runs in one pass with a round.  This module knows counts only.

A round reads all weights for few nodes, and a chunk reads them again.  In one pass they are read once.  Whatever such a pass
takes, all running rows wait for; so it is small while few tokens wait, and grows with them, so that rows don't stay empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from specdec.engine.chunks import ChunkBudget, PromptRest

# A pass may cost a quarter of what waits.  Simulated: benchmarks/serving/README.md, "Chunks and rounds in one pass".
WAITING = 4


class Mixing(NamedTuple):
    """What a round and a chunk in one pass may cost together, in the unit of ChunkBudget; a node costs 1.

    least: the budget of a pass while few tokens wait.  It grows to ChunkBudget.beside_rounds.
    """

    least: int

    def budget(self, budget: ChunkBudget, nodes: int, prompts: Sequence[PromptRest]) -> ChunkBudget:
        """The budget of the chunk beside so many nodes.  It knows no bursts: no row waits for other prompts.

        prompts: what is left of each, of those that hold rows.
        """
        waiting, least = sum(left.tokens for left in prompts), min(self.least, budget.beside_rounds)
        both = min(budget.beside_rounds, max(least, waiting // WAITING))
        beside = max(both - nodes, least // 4)
        return replace(budget, beside_rounds=beside, whole_prompts=beside, nodes=nodes)
