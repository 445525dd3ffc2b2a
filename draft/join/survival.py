"""How likely the next token of a path is to be accepted, given that all tokens before it are: learnt from what rounds emitted.

Rates are kept by class of path, length of the match that proposed it, and depth.  Each step of a path that a text reached is
one trial, whether the step was verified or not: what the round emitted tells how the text goes on.  Counts are whole numbers,
so that several ranks hold the same ones in whatever order they add them up.

On a CPU the definitions here run; on a GPU `learn` is two launches of survival_triton.py.  It knows paths, neither trees nor
texts.

Shapes: B sequences, P paths of each, D tokens of a path, E emitted tokens of a row with padding, C classes, L lengths, G groups
of depths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.batch.emitted import NewTokens
from specdec.draft.ngram.lookup import MAX_MATCH
from specdec.ops.index import arange, kept, use_index_kernels

MATCHES = 2  # paths that are matches of a text
FIRST, OTHER, CHAIN = range(3)  # classes: a text's best match, its other matches, a drafter's chain that has no scores
LENGTHS = MAX_MATCH + 1
FIRST_DEPTHS = (0, 1, 2, 4)  # of each group; 0: the root's children
MAX_TRIALS = 256  # threshold: with more trials both counts are halved, so that what was accepted lately weighs more
WEIGHT = 4.0  # trials that a prior is worth
# What is expected of a path's first token before anything was seen: by the length of its match, and of a drafter's chain.
PRIOR, CHAIN_PRIOR = (0.01, 0.15, 0.25, 0.45, 0.55, 0.6, 0.65, 0.7, 0.8), 0.7


@kept
def prior_rates(device: torch.device) -> Tensor:
    """[C, L, G] float32.  Where the first tokens of a match were right the next ones mostly are: each group of depths halves
    what is missing to 1.
    """
    by_length_L = torch.tensor(PRIOR, dtype=torch.float32, device="cpu")
    halves_G = 0.5 ** torch.arange(len(FIRST_DEPTHS), dtype=torch.float32, device="cpu")
    missing_CLG = (1 - torch.stack((by_length_L, 0.8 * by_length_L)))[..., None] * halves_G
    chain_1LG = torch.full((1, LENGTHS, len(FIRST_DEPTHS)), 1 - CHAIN_PRIOR, dtype=torch.float32, device="cpu")
    return (1 - torch.cat((missing_CLG, chain_1LG))).to(device)


@kept
def groups_of(depth: int, device: torch.device) -> Tensor:
    """[D] int64: the group of each depth."""
    depths_D = torch.arange(depth, dtype=torch.int64, device="cpu")
    first_G = torch.tensor(FIRST_DEPTHS, dtype=torch.int64, device="cpu")
    return (depths_D[:, None] >= first_G).sum(1).sub(1).to(device)


@kept
def classes_of_paths(device: torch.device) -> Tensor:
    """[P] int64: the class of each path of a round."""
    return torch.tensor([FIRST] + [OTHER] * (MATCHES - 1) + [CHAIN], dtype=torch.int64, device="cpu").to(device)


class Survival:
    """counts_CLG2: int32, the trials and how many of them were accepted; halved together now and then."""

    def __init__(self, device: torch.device) -> None:
        self.counts_CLG2 = torch.zeros(3, LENGTHS, len(FIRST_DEPTHS), 2, dtype=torch.int32, device=device)

    def log_rates(self, lengths_BP: Tensor, depth: int) -> Tensor:
        """[B, P, D] float32, below 0: the logarithm of each step's rate.

        lengths_BP: int64, how many tokens before each path matched; see Paths.  depth: D.
        """
        device = self.counts_CLG2.device
        classes_P = classes_of_paths(device)
        trials_CLG, accepted_CLG = self.counts_CLG2.unbind(-1)
        rates_CLG = (accepted_CLG + WEIGHT * prior_rates(device)) / (trials_CLG + WEIGHT)
        rates_BPG = rates_CLG.log()[classes_P, lengths_BP.clamp(0, MAX_MATCH)]
        return rates_BPG[..., groups_of(depth, device)]

    def learn(self, tokens_BPD: Tensor, lengths_BP: Tensor, new: NewTokens, active_B: Tensor) -> None:
        """Counts how far each path was right.

        tokens_BPD, lengths_BP: the paths that a round's trees were made of; see Paths.  new: what the round emitted.
        active_B: int64, 0 in rows of padding.
        """
        if use_index_kernels(tokens_BPD):
            from specdec.draft.join.survival_triton import launch_learn

            return launch_learn(self.counts_CLG2, tokens_BPD, lengths_BP, new, active_B)
        self.counts_CLG2.copy_(halved(self.counts_CLG2))
        classes_P, E, device = classes_of_paths(tokens_BPD.device), new.tokens_BE.shape[1], self.counts_CLG2.device
        tokens_BPD = tokens_BPD[..., :E]
        D, G = tokens_BPD.shape[2], len(FIRST_DEPTHS)
        is_right_BPD = tokens_BPD == new.tokens_BE[:, None, :D]
        is_known_BD = (arange(D, device) <= new.last_B[:, None]) & (active_B[:, None] > 0)
        reached_BPD = is_right_BPD.cumprod(-1).roll(1, -1)
        reached_BPD[..., 0] = 1
        trials_BPD = (reached_BPD * (is_known_BD[:, None] & (tokens_BPD >= 0))).int()
        cells_BPD = ((classes_P * LENGTHS + lengths_BP.clamp(0, MAX_MATCH)) * G)[..., None] + groups_of(D, device)
        for counts_CLG, added_BPD in zip(self.counts_CLG2.unbind(-1), (trials_BPD, trials_BPD * is_right_BPD), strict=True):
            sums_X = torch.zeros(counts_CLG.numel(), dtype=torch.int32, device=device)
            sums_X.index_add_(0, cells_BPD.flatten(), added_BPD.flatten())
            counts_CLG += sums_X.view_as(counts_CLG)


def halved(counts_CLG2: Tensor) -> Tensor:
    """The counts, with half of each where there are more than MAX_TRIALS."""
    return torch.where(counts_CLG2[..., :1] > MAX_TRIALS, counts_CLG2 // 2, counts_CLG2)
