"""Gumbel noise that depends on (seed, position, token) alone.

The seed fixes the noise of every position and token beforehand.  So whoever knows a request's seed knows the noise with which
its tokens will be sampled, before the logits are known.  `perturb` adds it to a drafter's logits.

Shapes: R rows (one distribution each), V vocabulary, W a run of it, B sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.ops.index import use_index_kernels
from specdec.ops.launch import use_kernels
from specdec.ops.noise.approximate_cutoff import approximate_cutoffs
from specdec.ops.noise.filters import Filters

# SplitMix64's constants (Steele, Lea, Flood 2014), as signed 64-bit numbers.  Integer products wrap, as SplitMix64 wants.
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & (2 ** (64 - bits) - 1)  # int64's own shift fills the high bits with the sign


def mix_64(x: Tensor) -> Tensor:
    """SplitMix64's finaliser: a bijection of int64 whose output bits all depend on all input bits."""
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


def gumbel_noise(seed_R: Tensor, position_R: Tensor, vocab_size: int, first: int = 0) -> Tensor:
    """[R, V] float32 standard Gumbel noise, a pure function of (seed, position, token id), of the V ids from `first` on.

    seed_R, position_R: int64.
    """
    if use_index_kernels(seed_R):
        from specdec.ops.noise.gumbel_triton import launch_gumbel_noise

        return launch_gumbel_noise(seed_R, position_R, vocab_size, first)
    return token_noise(seed_R, position_R, torch.arange(first, first + vocab_size, dtype=torch.int64, device=seed_R.device))


def token_noise(seed_R: Tensor, position_R: Tensor, tokens_V: Tensor) -> Tensor:
    """[R, V] float32: `gumbel_noise` of these token ids (int64)."""
    key_R = mix_64(mix_64(seed_R + GOLDEN) + position_R * GOLDEN)
    bits_RV = _shift_right(mix_64(key_R[:, None] + (tokens_V + 1) * GOLDEN), 12)
    uniform_RV = (bits_RV.double() + 0.5) * 2.0**-52  # exact, so never 0 or 1
    return -torch.log(-torch.log(uniform_RV)).float()


class Noise(NamedTuple):
    """The noise with which tokens of B sequences will be sampled, and how it is weighed against a drafter's logits.

    temperature_B: float32.  A sequence of temperature 0 gets no noise, and its logits stay as they are.
    seed_B: int64.  lens_B: int32.  ahead: the tokens stand at position lens_B + ahead.
    logit_weight, noise_weight: factors of the logits, and of temperature times noise.
    filters: which tokens may be sampled; None: all.
    cutoff_weight: how many times more the distance counts by which a logit lies below the filters' approximate cutoff.
    """

    temperature_B: Tensor
    seed_B: Tensor
    lens_B: Tensor
    ahead: int
    logit_weight: float
    noise_weight: float
    cutoff_weight: float = 0.0
    filters: Filters | None = None

    @property
    def logit_weights(self) -> Tensor:
        """[B] float32: the factor of each sequence's logits."""
        return torch.full_like(self.temperature_B, self.logit_weight).where(self.temperature_B > 0, 1.0)

    def at(self, ahead: int) -> Noise:
        """The noise of tokens at position lens_B + ahead."""
        return self._replace(ahead=ahead)


def perturb(
    logits_RW: Tensor, noise: Noise, offsets_V: Tensor | None = None, first: int = 0, cutoff_R: Tensor | None = None
) -> Tensor:
    """[R, W] float32: weighed logits plus weighed noise; on a GPU one kernel launch, or two with filters.

    logits_RW: of the W ids from `first` on.  A sequence's rows are adjacent, equally many for each sequence.
    offsets_V: int64, what is added to an id to make it the id whose noise is meant.
    cutoff_R: float32, `approximate_cutoffs` of rows of which these are a run; None: these are all their logits.
    """
    if noise.filters is not None and cutoff_R is None:
        cutoff_R = approximate_cutoffs(logits_RW, noise.filters)
    if use_kernels(logits_RW):
        from specdec.ops.noise.gumbel_triton import launch_perturb

        return launch_perturb(logits_RW, noise, offsets_V, first, cutoff_R)
    R, W = logits_RW.shape
    each = R // noise.seed_B.shape[0]
    tokens_W = torch.arange(first, first + W, dtype=torch.int64, device=logits_RW.device)
    if offsets_V is not None:
        tokens_W = tokens_W + offsets_V[first : first + W]
    noise_BW = token_noise(noise.seed_B, noise.lens_B.long() + noise.ahead, tokens_W)
    temperature_B1, weight_B1 = noise.temperature_B[:, None], noise.logit_weights[:, None]
    added_BW = noise_BW * (temperature_B1 * noise.noise_weight)
    logits_RW = logits_RW.float()
    if cutoff_R is not None:
        below_RW = logits_RW - cutoff_R[:, None]
        logits_RW = torch.where(below_RW < 0, logits_RW + noise.cutoff_weight * below_RW, logits_RW)
    return logits_RW * weight_B1.repeat_interleave(each, 0) + added_BW.repeat_interleave(each, 0)
