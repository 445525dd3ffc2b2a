"""Drafts that know the target's noise.

The target's token at a place is the one with the largest log p + noise, p being its distribution and the noise fixed by the
seed, the position and the token before anything is computed.  So drafts are chosen by the same sum with the drafter's q for p
(the coupling of Daliri, Musco and Suresh, arXiv 2408.07978), and the text stays the target's own.

The drafter's log q is the target's log p and an error.  A token of a small q and a large noise is more often one whose q is too
large than one that the target will choose, so the noise counts less than the drafter's logits.  The log-softmax of the weighed
sum estimates the log-probability that the target will choose the token, given q and the noise: a score for trees.

Where the target's filters keep few tokens, large noise on one of the others means nothing.  Which tokens the target keeps is
not known; those that the same filters would drop of q are made less likely, the more so the further they lie below q's
approximate cutoff.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.batch.sampling import RowSampling
from specdec.ops.noise.gumbel import Noise
from specdec.steps import Needs

# Fitted, as a multinomial logit, to what three heads of two targets drafted at temperatures 0.3 to 1.
LOGIT_WEIGHT, NOISE_WEIGHT = 1.5, 1.2
CUTOFF_WEIGHT = 2.0  # chosen for accept length with top-k 20 and top-p of 0.7 to 0.95


def noise_of(lens_B: Tensor, sampling: RowSampling, needs: Needs) -> Noise:
    """The noise of the tokens one position after the bonus tokens, which stand at positions lens_B (int32)."""
    filters = None if needs.steps.isdisjoint(("filtered", "min_p")) else sampling.filters
    return Noise(sampling.temperature_R, sampling.seed_R, lens_B, 1, LOGIT_WEIGHT, NOISE_WEIGHT, CUTOFF_WEIGHT, filters)


def noise_of_levels(noise: Noise, levels: int) -> Noise:
    """The noise of the tokens at `levels` positions from noise's own on: a sequence for each of them, in one row of logits.

    noise: of B sequences; the result is of B * levels, of which a sequence's are adjacent.
    """
    ahead_L = torch.arange(levels, dtype=torch.int32, device=noise.lens_B.device)
    lens_BL = noise.lens_B[:, None] + ahead_L
    filters = noise.filters and noise.filters.expand_rows(lens_BL.numel())
    columns = (noise.temperature_B.repeat_interleave(levels), noise.seed_B.repeat_interleave(levels), lens_BL.flatten())
    return noise._replace(temperature_B=columns[0], seed_B=columns[1], lens_B=columns[2], filters=filters)
