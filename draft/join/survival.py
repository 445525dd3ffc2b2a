"""How likely the next token of a path is to be accepted, given that all tokens before it are: learnt from what rounds emitted.

Rates are kept by class of path, length of the match that proposed it, how many equally long matches agree with it (see
`support_of`), and depth; and apart for the step at which a path parts from the drafter's tree, where the drafter proposed other
tokens: such a step is right much less often.  Each step of a path that a text reached is one trial, whether the step was
verified or not: what the round emitted tells how the text goes on.
Counts are whole numbers, so that several ranks hold the same ones in whatever order they add them up.

On a CPU the definitions here run; on a GPU `learn` is two launches of survival_triton.py.  It knows paths, neither trees nor
texts nor who proposes what.

Shapes: B sequences, P paths of each, D tokens of a path, E emitted tokens of a row with padding, C classes, L lengths, K kinds
of support, G groups of depths, those of steps that part last.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specdec.batch.emitted import NewTokens
from specdec.draft.ngram.lookup import MAX_MATCH
from specdec.ops.index import arange, kept, use_index_kernels

if TYPE_CHECKING:
    from specdec.draft.join.paths import Paths

LENGTHS = MAX_MATCH + 1
FIRST_DEPTHS = (0, 1, 2, 4)  # of each group; 0: the root's children
GROUPS = 2 * len(FIRST_DEPTHS)  # G
PARTING = 0.4  # how likely a step that parts is at first, beside one that does not
ONCE, ALL, MOST, FEW, IN_STEP = range(5)  # of support
SUPPORTS = 5  # K
MISSING = (1.0, 0.7, 1.1, 1.4, 0.7)  # what is missing to 1 at first, by support, beside what is missing without regard to it
MAX_TRIALS = 256  # threshold: with more trials both counts are halved, so that what was accepted lately weighs more
LEAST = 0.01  # of what is expected at first
WEIGHT = 4.0  # trials that a prior is worth


class PathClass(NamedTuple):
    """What is expected of paths before any was seen.

    first_L: how likely a path's first token is right, by the length of its match.
    improves: whether each group of depths halves what is missing to 1: where a match's first tokens were right the next ones
        mostly are.
    """

    first_L: tuple[float, ...]
    improves: bool = True

    def prior(self) -> Tensor:
        """[L, K, G] float32."""
        assert len(self.first_L) == LENGTHS
        missing_L11 = 1 - torch.tensor(self.first_L, dtype=torch.float32, device="cpu")[:, None, None]
        missing_LK1 = missing_L11 * torch.tensor(MISSING, dtype=torch.float32, device="cpu")[:, None]
        halves_G = 0.5 ** torch.arange(len(FIRST_DEPTHS), dtype=torch.float32, device="cpu")
        rates_LKG = (1 - missing_LK1 * (halves_G if self.improves else torch.ones_like(halves_G))).clamp(min=LEAST)
        return torch.cat((rates_LKG, PARTING * rates_LKG), dim=2)


def support_of(agree_X: Tensor, total_X: Tensor) -> Tensor:
    """int64: what speaks for matches beside their length.

    total_X: how many matches are as long as each, itself included; agree_X: how many of them go on with the same token.  ONCE:
    there is no other; ALL, MOST or FEW of them (at most half) go on alike.
    """
    some_X = MOST + (FEW - MOST) * (2 * agree_X <= total_X).long()
    return torch.where(agree_X < total_X, some_X, ONCE + (ALL - ONCE) * (total_X > 1).long())


CHAIN = PathClass((0.7,) * LENGTHS, improves=False)  # a drafter's chain that has no scores


@kept
def groups_of(depth: int, device: torch.device) -> Tensor:
    """[D] int64: the group of each depth."""
    depths_D = torch.arange(depth, dtype=torch.int64, device="cpu")
    first_G = torch.tensor(FIRST_DEPTHS, dtype=torch.int64, device="cpu")
    return (depths_D[:, None] >= first_G).sum(1).sub(1).to(device)


class Survival:
    """counts_CLKG2: int32, the trials and how many of them were accepted; halved together now and then.

    prior_CLKG: float32, what is expected before.
    """

    def __init__(self, classes: Sequence[PathClass], device: torch.device) -> None:
        shape = len(classes), LENGTHS, SUPPORTS, GROUPS
        self.counts_CLKG2 = torch.zeros(*shape, 2, dtype=torch.int32, device=device)
        self.prior_CLKG = torch.stack([each.prior() for each in classes]).to(device)

    def log_rates(self, paths: Paths, depth: int) -> Tensor:
        """[B, P, D] float32, below 0: the logarithm of each step's rate.  depth: D."""
        trials_CLKG, accepted_CLKG = self.counts_CLKG2.unbind(-1)
        rates_CLKG = (accepted_CLKG + WEIGHT * self.prior_CLKG) / (trials_CLKG + WEIGHT)
        rates_BPG = rates_CLKG.log()[paths.classes_P, paths.lengths_BP.clamp(0, MAX_MATCH), paths.support_BP]
        return rates_BPG.gather(2, self._groups(paths, depth))

    def _groups(self, paths: Paths, depth: int) -> Tensor:
        """[B, P, D] int64: the group of each step."""
        device = paths.parts_BP.device
        parts_BPD = paths.parts_BP[..., None] == arange(depth, device)
        return groups_of(depth, device) + len(FIRST_DEPTHS) * parts_BPD

    def learn(self, paths: Paths, new: NewTokens, active_B: Tensor) -> None:
        """Counts how far each path was right.

        paths: those that a round's trees were made of.  new: what the round emitted.  active_B: int64, 0 in rows of padding.
        """
        tokens_BPD, lengths_BP = paths.tokens_BPD, paths.lengths_BP.clamp(0, MAX_MATCH)
        if use_index_kernels(tokens_BPD):
            from specdec.draft.join.survival_triton import launch_learn

            return launch_learn(self.counts_CLKG2, paths, new, active_B)
        self.counts_CLKG2.copy_(halved(self.counts_CLKG2))
        E, device = new.tokens_BE.shape[1], self.counts_CLKG2.device
        tokens_BPD = tokens_BPD[..., :E]
        D = tokens_BPD.shape[2]
        is_right_BPD = tokens_BPD == new.tokens_BE[:, None, :D]
        is_known_BD = (arange(D, device) <= new.last_B[:, None]) & (active_B[:, None] > 0)
        reached_BPD = is_right_BPD.cumprod(-1).roll(1, -1)
        reached_BPD[..., 0] = 1
        trials_BPD = (reached_BPD * (is_known_BD[:, None] & (tokens_BPD >= 0))).int()
        cells_BP = (paths.classes_P * LENGTHS + lengths_BP) * SUPPORTS + paths.support_BP
        cells_BPD = (cells_BP * GROUPS)[..., None] + self._groups(paths, D)
        for counts_CLKG, added_BPD in zip(self.counts_CLKG2.unbind(-1), (trials_BPD, trials_BPD * is_right_BPD), strict=True):
            sums_X = torch.zeros(counts_CLKG.numel(), dtype=torch.int32, device=device)
            sums_X.index_add_(0, cells_BPD.flatten(), added_BPD.flatten())
            counts_CLKG += sums_X.view_as(counts_CLKG)


def halved(counts_CLKG2: Tensor) -> Tensor:
    """The counts, with half of each where there are more than MAX_TRIALS."""
    return torch.where(counts_CLKG2[..., :1] > MAX_TRIALS, counts_CLKG2 // 2, counts_CLKG2)
