"""The token that each row samples: the one with the largest logit / temperature + noise (Gumbel-max).

On a CPU and under autograd the definition here runs; on a GPU two launches, of sample_triton.py and of a merge, give the same
tokens.  Which tokens filters drop is found before (cutoff.py).

Shapes: B sequences, R rows of logits, equally many and adjacent for each sequence, V vocabulary, W a run of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.ops.launch import use_kernels
from specdec.ops.noise.cutoff import Cutoff
from specdec.ops.noise.gumbel import gumbel_noise


def sampled_tokens(
    logits_RV: Tensor, temperature_B: Tensor, seed_B: Tensor, position_R: Tensor, cutoff: Cutoff | None = None
) -> Tensor:
    """[R] int64: each row's token; -1 where the largest logit is not a finite number.

    temperature_B: float32; a sequence of temperature 0 takes its largest logit.  seed_B: int64.  position_R: int64, of the
    token.  cutoff: what filters keep of rows that are not greedy; None: all.  Ties go to the lower id.
    """
    if use_kernels(logits_RV):
        from specdec.ops.noise.sample_triton import launch_sampled_tokens

        return launch_sampled_tokens(logits_RV, temperature_B, seed_B, position_R, cutoff)
    each = logits_RV.shape[0] // seed_B.shape[0]
    temperature_R, seed_R = temperature_B.repeat_interleave(each), seed_B.repeat_interleave(each)
    scores_RV = gumbel_scores(logits_RV.float(), temperature_R, seed_R, position_R, cutoff)
    return torch.where(logits_RV.amax(-1).isfinite(), scores_RV.argmax(-1), -1)


def gumbel_scores(
    logits_RW: Tensor, temperature_R: Tensor, seed_R: Tensor, position_R: Tensor, cutoff: Cutoff | None = None, first: int = 0
) -> Tensor:
    """[R, W] float32: what the sampled token has the largest of.  logits_RW: float32, of the W ids from `first` on.

    The other arguments: see `sampled_tokens`.
    """
    is_greedy_R1 = (temperature_R == 0)[:, None]
    scaled_RW = logits_RW / torch.where(is_greedy_R1, 1.0, temperature_R[:, None])
    noise_RW = gumbel_noise(seed_R, position_R, logits_RW.shape[1], first)
    scores_RW = torch.where(is_greedy_R1, logits_RW, scaled_RW + noise_RW)
    if cutoff is None:
        return scores_RW
    return scores_RW.where(is_greedy_R1 | cutoff.keeps(logits_RW, scaled_RW, first), -torch.inf)
