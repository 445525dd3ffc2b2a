"""A product that several programs share, before anybody has added up what each of them computed.

Shapes: S terms, T rows, H out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Terms(NamedTuple):
    """terms_STH: float32, contiguous.  Their sum, in their order, rounded to `dtype`, is the product."""

    terms_STH: Tensor
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        """The product."""
        total_TH, *others = self.terms_STH
        for term_TH in others:
            total_TH = total_TH + term_TH
        return total_TH.to(self.dtype)


def added_up(x: Tensor | Terms) -> Tensor:
    """The product, whether its terms have been added up or not."""
    return x.tensor() if isinstance(x, Terms) else x
