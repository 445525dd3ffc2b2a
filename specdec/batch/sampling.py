"""Turns logits into tokens by temperature, top-k, top-p and noise that depends only on (seed, position, token).

The seed fixes the noise of every position beforehand.  So the token that is sampled at a position is a function of the target's
logits and the seed: batch, padding, CUDA graphs and the drafter can't change it, and sampled text is the same with and without
speculation.

Shapes: R rows (one distribution each), V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# SplitMix64's constants (Steele, Lea, Flood 2014), as signed 64-bit numbers.  Integer products wrap, as SplitMix64 wants.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64
_BEST = 2.0**40  # the weight of a row's best token; that of a token 28 below it in logits is 1


class RowSampling(NamedTuple):
    """How each row samples.  temperature_R and top_p_R: float32; top_k_R and seed_R: int64.  top_k 0 keeps all tokens."""

    temperature_R: Tensor
    top_k_R: Tensor
    top_p_R: Tensor
    seed_R: Tensor

    def expand_rows(self, times: int) -> RowSampling:
        """Each row repeated `times` times; the copies of a row are adjacent."""
        return RowSampling(*(x.repeat_interleave(times) for x in self))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & (2 ** (64 - bits) - 1)  # int64's own shift fills the high bits with the sign


def mix_64(x: Tensor) -> Tensor:
    """SplitMix64's finaliser: a bijection of int64 whose output bits all depend on all input bits."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def gumbel_noise(seed_R: Tensor, position_R: Tensor, vocab_size: int, first: int = 0) -> Tensor:
    """[R, V] float32 standard Gumbel noise, a pure function of (seed, position, token id), of the V ids from `first` on."""
    key_R = mix_64(mix_64(seed_R + _GOLDEN) + position_R * _GOLDEN)
    tokens_V = torch.arange(first + 1, first + vocab_size + 1, device=seed_R.device)
    bits_RV = _shift_right(mix_64(key_R[:, None] + tokens_V * _GOLDEN), 12)
    uniform_RV = (bits_RV.double() + 0.5) * 2.0**-52  # exact, so never 0 or 1
    return -torch.log(-torch.log(uniform_RV)).float()


def filter_logits(logits_RV: Tensor, sampling: RowSampling) -> Tensor:
    """[R, V]: the logits, with -inf for all tokens outside top-k, and outside top-p of the tokens that top-k keeps.

    logits_RV: already divided by the temperature.

    top-p keeps the smallest set whose probability reaches top_p.  Of equal logits at a border, those of lower ids are kept.
    """
    sorted_RV, order_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logits_RV.shape[-1], device=logits_RV.device)
    top_k_R1 = torch.where(sampling.top_k_R > 0, sampling.top_k_R, logits_RV.shape[-1])[:, None]
    sorted_RV = sorted_RV.masked_fill(rank_V >= top_k_R1, -torch.inf)
    # Sums of integers are exact in any order.  A library's sum of floats has an order that depends on the number of rows, by
    # which a token at top-p's border could depend on the batch.
    weights_RV = ((sorted_RV - sorted_RV[:, :1]).exp() * _BEST).long()
    sums_RV = weights_RV.cumsum(-1)
    top_p_R1 = sampling.top_p_R[:, None]
    outside = (sums_RV - weights_RV >= top_p_R1 * sums_RV[:, -1:].double()) & (top_p_R1 < 1) & (rank_V > 0)
    return torch.empty_like(logits_RV).scatter_(1, order_RV, sorted_RV.masked_fill(outside, -torch.inf))


def sampling_scores(logits_RV: Tensor, sampling: RowSampling, position_R: Tensor, filtered: bool, first: int = 0) -> Tensor:
    """[R, V] float32, whose argmax is a sample of softmax(filter(logits / temperature)), or the logits' own at temperature 0.

    logits_RV: of the V ids from `first` on.  filtered: needs the logits of all ids.
    position_R: int64, the absolute position of the token to be sampled.
    filtered: whether any row has top_k or top_p set; if not, the sort that they need is left out.

    The method is Gumbel-max: argmax(log p + Gumbel noise) is a sample of p.
    """
    logits_RV = logits_RV.float()
    greedy_R = sampling.temperature_R == 0
    scaled_RV = logits_RV / torch.where(greedy_R, 1.0, sampling.temperature_R)[:, None]
    if filtered:
        scaled_RV = filter_logits(scaled_RV, sampling)
    noise_RV = gumbel_noise(sampling.seed_R, position_R, logits_RV.shape[-1], first)
    return torch.where(greedy_R[:, None], logits_RV, scaled_RV + noise_RV)


def sample_rows(logits_RV: Tensor, sampling: RowSampling, position_R: Tensor, filtered: bool) -> Tensor:
    """[R] int64: a token per row, an exact sample of softmax(filter(logits / temperature)), or the argmax at temperature 0."""
    return sampling_scores(logits_RV, sampling, position_R, filtered).argmax(-1)
