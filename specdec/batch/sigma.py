"""top-n-sigma: which logits lie near enough to their row's largest, measured in standard deviations of the row.

It looks at the logits themselves, so it comes before the temperature, and after all that changes them (Tang and others, arXiv
2411.07641; llama.cpp's sampler of this name).  The deviation is over finite logits: a banned token does not count.

Shapes: B sequences, R rows of logits, equally many for each sequence, W a rank's run of the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.batch.rules import LogitRows
from specdec.parallel.vocabulary import Vocabulary

ONE = 2.0**44  # what a whole span counts: so sums of squares of 2**18 tokens fit into 63 bits


def near_the_best(logits_RW: Tensor, rows: LogitRows) -> Tensor:
    """Bans tokens that lie more than top_n_sigma deviations below the row's largest logit, in rows that are sampled."""
    each = logits_RW.shape[0] // rows.sampling.rows
    sigmas_B, temperature_B = rows.sampling.column("top_n_sigma"), rows.sampling.temperature_R
    sigmas_R = sigmas_B.where(temperature_B > 0, 0.0).repeat_interleave(each)
    logits_RW = logits_RW.float()
    largest_R = rows.vocabulary.largest(logits_RW)
    least_R = largest_R - sigmas_R * deviation(logits_RW, largest_R, rows.vocabulary)
    return logits_RW.masked_fill((logits_RW < least_R[:, None]) & (sigmas_R > 0)[:, None], -torch.inf)


def deviation(logits_RW: Tensor, largest_R: Tensor, vocabulary: Vocabulary) -> Tensor:
    """[R] float64: the standard deviation of each row's finite logits, over the runs of all ranks.

    logits_RW, largest_R: float32.  Of rows with NaN or inf, and of those without a finite logit, the result is NaN.
    """
    is_finite_RW = logits_RW.isfinite()
    span_R = largest_R + vocabulary.largest(torch.where(is_finite_RW, -logits_RW, -torch.inf))
    below_RW = (largest_R[:, None] - logits_RW) / span_R.where(span_R > 0, 1.0)[:, None]  # 0 to 1

    def mean(x_RW: Tensor) -> Tensor:
        # Sums of integers are exact in any order, so they don't depend on the batch, or on how many ranks divide the row.
        sums_R2 = torch.stack([(x_RW.where(is_finite_RW, 0.0) * ONE).long().sum(-1), is_finite_RW.sum(-1)], dim=-1)
        if vocabulary.group.size > 1:
            sums_R2 = vocabulary.group.all_gather(sums_R2).sum(0)
        return sums_R2[:, 0].double() / ONE / sums_R2[:, 1]

    # Squares of differences from the mean keep their digits where most logits lie together, far from the others.
    return span_R * mean((below_RW - mean(below_RW).float()[:, None]).square()).sqrt()
