"""ALiBi's slopes as BLOOM, MPT and Falcon have them, for any number of heads.

Most of these models have ALiBi: a head's logits get slope * (key's position - query's position).  The families add slope * the
key's position alone, which differs by a constant for each query, and a softmax takes constants out.

Shape: H heads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.ops.index import kept


class Slopes(NamedTuple):
    """ALiBi's slopes as numbers on the host, which become a tensor on a device when the first pass asks for it."""

    of_heads: tuple[float, ...]

    def on(self, device: torch.device) -> Tensor:
        """[H] float32, always the same tensor for a device, so that a CUDA graph may read it."""
        return _on_device(self.of_heads, device)


@kept
def _on_device(slopes: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def slopes_of_bloom(heads: int) -> tuple[float, ...]:
    """For P heads, P a power of two: 2 ** (-8 / P), its square and so on, down to 2 ** -8.

    For other counts P is the next lower power of two, and the heads beyond P get every second slope of 2 P heads.
    """
    power = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8 * i / power) for i in range(1, power + 1)]
    return *first, *(2.0 ** (-8 * i / (2 * power)) for i in range(1, 2 * (heads - power), 2))


def slopes_of_mpt(heads: int, bias_max: float) -> tuple[float, ...]:
    """For P heads, P a power of two: P slopes down to 2 ** -bias_max, each by the same factor smaller than the one before.

    For other counts P is the next higher power of two, and the heads get every second of its slopes, from the second one on,
    and then the others, from the first one on.
    """
    power = 1 << (heads - 1).bit_length()
    slopes = [2.0 ** (-bias_max * i / power) for i in range(1, power + 1)]
    return tuple(slopes if power == heads else [*slopes[1::2], *slopes[::2]][:heads])


def slopes_of_falcon(heads: int, scale: float) -> tuple[float, ...]:
    """BLOOM's, rounded to bfloat16, and multiplied by the scale, which Falcon's code applies to products and biases alike.

    That code rounds the products of slopes and positions to bfloat16 too.  The rounding is left out here: it would make a text
    depend on where it begins.
    """
    rounded = torch.tensor(slopes_of_bloom(heads), dtype=torch.bfloat16, device="cpu").tolist()
    return tuple(slope * scale for slope in rounded)
