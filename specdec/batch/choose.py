"""Chooses the target's tokens from its logits: one pass, of which a batch runs the steps that it needs.

For each row of logits the token chosen is the argmax of a score: of the logits themselves where the row is greedy, else of the
filtered log-probabilities plus noise (Gumbel-max, see ops/noise/gumbel.py).  This module knows no model and no tree.

Shapes: R rows of logits, W a rank's run of the vocabulary, V the vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.batch.sampling import RowSampling, filter_logits
from specdec.ops.noise.gumbel import gumbel_noise
from specdec.parallel.vocabulary import Vocabulary
from specdec.steps import Needs


def choose_tokens(
    logits_RW: Tensor, sampling: RowSampling, positions_R: Tensor, needs: Needs, vocabulary: Vocabulary
) -> Tensor:
    """[R] int64: the target's token after the one at each row's absolute position; -1 where the logits are not finite.

    logits_RW: of this rank's run of the vocabulary.
    sampling: the options of each sequence.  A sequence's rows of logits are adjacent, equally many for each sequence.
    """
    if not needs.sampled:
        return vocabulary.greedy(logits_RW, finite=True)
    scores_RW = token_scores(logits_RW, sampling, positions_R, needs, vocabulary)
    tokens_R = vocabulary.greedy(scores_RW)
    return tokens_R.where(vocabulary.largest(logits_RW).isfinite(), -1)


def token_scores(logits_RW: Tensor, sampling: RowSampling, positions_R: Tensor, needs: Needs, vocabulary: Vocabulary) -> Tensor:
    """[R, W] float32: the scores of which the chosen token has the highest.  Arguments: see `choose_tokens`."""
    logits_RW = logits_RW.float()
    if not needs.sampled:
        return logits_RW
    rows = sampling.expand_rows(logits_RW.shape[0] // sampling.rows)
    greedy_R1 = (rows.temperature_R == 0)[:, None]
    scaled_RW = logits_RW / torch.where(greedy_R1, 1.0, rows.temperature_R[:, None])
    if needs.filtered:  # top-k and top-p sort the logits of the whole vocabulary
        scaled_RW = vocabulary.part(filter_logits(vocabulary.whole(scaled_RW), rows))
    noise_RW = gumbel_noise(rows.seed_R, positions_R + 1, logits_RW.shape[1], vocabulary.first)
    return torch.where(greedy_R1, logits_RW, scaled_RW + noise_RW)
