"""Gumbel noise that depends on (seed, position, token) alone.

The seed fixes the noise of every position and token beforehand.  So whoever knows a request's seed knows the noise with which
its tokens will be sampled.

Shapes: R rows (one distribution each), V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
    """[R, V] float32 standard Gumbel noise, a pure function of (seed, position, token id), of the V ids from `first` on."""
    return token_noise(seed_R, position_R, torch.arange(first, first + vocab_size, device=seed_R.device))


def token_noise(seed_R: Tensor, position_R: Tensor, tokens_V: Tensor) -> Tensor:
    """[R, V] float32: `gumbel_noise` of these token ids (int64)."""
    key_R = mix_64(mix_64(seed_R + GOLDEN) + position_R * GOLDEN)
    bits_RV = _shift_right(mix_64(key_R[:, None] + (tokens_V + 1) * GOLDEN), 12)
    uniform_RV = (bits_RV.double() + 0.5) * 2.0**-52  # exact, so never 0 or 1
    return -torch.log(-torch.log(uniform_RV)).float()
