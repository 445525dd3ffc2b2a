"""Drafts that know the target's noise.

The target's token at a place is the one with the largest log p + noise, p being its distribution and the noise fixed by the
seed, the position and the token before anything is computed.  So drafts are chosen by the same sum with the drafter's q for p
(the coupling of Daliri, Musco and Suresh, arXiv 2408.07978), and the text stays the target's own.

The drafter's log q is the target's log p and an error.  A token of a small q and a large noise is more often one whose q is too
large than one that the target will choose, so the noise counts less than the drafter's logits.  The log-softmax of the weighed
sum estimates the log-probability that the target will choose the token, given q and the noise: a score for trees.
"""

from __future__ import annotations

from torch import Tensor

from specdec.batch.sampling import RowSampling
from specdec.ops.noise.gumbel import Noise

# Fitted, as a multinomial logit, to what three heads of two targets drafted at temperatures 0.3 to 1.
LOGIT_WEIGHT, NOISE_WEIGHT = 1.5, 1.2


def noise_of(lens_B: Tensor, sampling: RowSampling) -> Noise:
    """The noise of the tokens one position after the bonus tokens, which stand at positions lens_B (int32)."""
    return Noise(sampling.temperature_R, sampling.seed_R, lens_B, 1, LOGIT_WEIGHT, NOISE_WEIGHT)
