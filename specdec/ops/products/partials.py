"""What a product leaves to the norm after it: sums of the programs that share its columns (split-K), a multiplier, and a norm.

Shapes: S splits, M rows, N out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Partials(NamedTuple):
    """sums_SMN: float32, contiguous; one alone may be of `dtype`, and its rows strided.  Their sum in float32, in any order,
    rounded to `dtype`, is the product.

    times: what the product is multiplied with, by families that multiply what they add; it is rounded once more then.
    """

    sums_SMN: Tensor
    dtype: torch.dtype
    times: float = 1.0

    def tensor(self) -> Tensor:
        """The product, multiplied."""
        total_MN, *others = self.sums_SMN
        for partial_MN in others:
            total_MN = total_MN + partial_MN
        product_MN = total_MN.to(self.dtype)
        return product_MN if self.times == 1 else product_MN * self.times


class TwoProducts(NamedTuple):
    """Two blocks' outputs of one width and dtype, whose rounded sum is added to the residual stream."""

    first: Tensor | Partials
    second: Tensor | Partials


Delta = Tensor | Partials | TwoProducts  # what a norm adds in its own launch


class NormedProduct(NamedTuple):
    """A block's output that is normed before it is added to the residual stream.

    weight_N, eps: of that norm.  scale_1: what the sum is multiplied with, one number; None: nothing.
    is_whole: whether the product is the sum of all ranks' already.
    """

    product: Delta
    weight_N: Tensor
    eps: float
    scale_1: Tensor | None = None
    is_whole: bool = False


def added_up(x: Delta) -> Tensor:
    """The product, or the sum of both, whether partials have been added up or not."""
    if isinstance(x, TwoProducts):
        return added_up(x.first) + added_up(x.second)
    return x.tensor() if isinstance(x, Partials) else x


def multiplied(x: Tensor | Partials, times: float) -> Tensor | Partials:
    """The product [M, N] times a number, for a norm that multiplies and adds in its own launch."""
    if times == 1:
        return x
    assert not isinstance(x, Partials) or x.times == 1
    return x._replace(times=times) if isinstance(x, Partials) else Partials(x[None], x.dtype, times)
