"""A DSpark head's trees against brute force, with estimates of acceptance that differ from branch to branch.

Shapes: B sequences, S levels, K branches, H hidden, r rank, W vocabulary.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.config import SpecConfig
from specdec.draft.block.rounds.trees import STOP_BELOW, STOPPED, MarkovWalk
from specdec.parallel.group import ALONE
from specdec.parallel.vocabulary import Vocabulary

B, S, H, RANK, W = 3, 4, 5, 4, 9


class WalkedHead:
    """What a walk asks of a head: logits, the Markov head's term of the token before, and estimates from 0 to 1."""

    def __init__(self, generator: torch.Generator) -> None:
        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self._lm_HW, self._table_Wr, self._out_rW = draw(H, W), draw(W, RANK), draw(RANK, W)
        self._sure_H, self._sure_r = draw(H), draw(RANK)
        self.vocabulary, self.d2t_V, self.confidence = Vocabulary.of(W, ALONE), None, object()
        self.markov = SimpleNamespace(
            embed=lambda tokens: self._table_Wr[tokens],
            plain=(self._table_Wr, self._out_rW.T),
        )

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self._lm_HW

    def confidences(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        return hidden @ self._sure_H + 2 * embedded @ self._sure_r

    def log_probs(self, hidden_H: Tensor, before: int) -> Tensor:
        return (self.logits(hidden_H) + self._table_Wr[before] @ self._out_rW).log_softmax(-1)

    def sure(self, hidden_H: Tensor, before: int) -> float:
        return float(self.confidences(hidden_H, self._table_Wr[before]).sigmoid())


def best_paths(head: WalkedHead, hidden_SH: Tensor, bonus: int, spec: SpecConfig) -> set[tuple[int, ...]]:
    """By the definition: each path alone."""
    placed, found = {(): 0.0}, dict[tuple[int, ...], float]()
    for level in range(S):
        children = dict[tuple[int, ...], float]()
        for path, score in placed.items():
            before = [bonus, *path]
            sure = math.prod(head.sure(hidden_SH[i], token) for i, token in enumerate(before))
            stopped = STOPPED if level and sure < STOP_BELOW else 0.0
            logp, tokens = head.log_probs(hidden_SH[level], before[-1]).topk(spec.topk)
            children |= {(*path, t): score + l - stopped for t, l in zip(tokens.tolist(), logp.tolist(), strict=True)}
        found |= children
        placed = dict(sorted(children.items(), key=lambda item: -item[1])[: spec.topk])
    return set(sorted(found, key=lambda path: -found[path])[: spec.num_draft_tokens - 1])


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shape", [(S, 3, 9), (S, 4, 24), (S, 2, 6)])
def test_a_branch_is_stopped_by_its_own_estimates(shape: tuple[int, int, int], seed: int) -> None:
    """Keeps out: the estimate of another branch, of another sequence, or of another level, which would stop a path that is sure
    and go on with one that is not."""
    generator, spec = torch.Generator().manual_seed(seed), SpecConfig(*shape)
    head: Any = WalkedHead(generator)
    hidden_BSH = torch.randn(B, S, H, generator=generator, dtype=torch.float64)
    bonus_B = torch.randint(W, (B,), generator=generator)
    tree = MarkovWalk(head, hidden_BSH, None).tree(bonus_B, spec)
    for row in range(B):
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tree.tokens_BN[row, 1:].tolist(), tree.parents_BN[row, 1:].tolist(), strict=True):
            paths.append((*paths[parent], token))
        assert set(paths[1:]) == best_paths(head, hidden_BSH[row], int(bonus_B[row]), spec)
