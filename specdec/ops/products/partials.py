"""Split-K: a product whose columns several programs share, before a later kernel has added up what each program computed.

Shapes: S splits, M rows, N out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Partials(NamedTuple):
    """sums_SMN: float32, contiguous.  Their sum in float32, in any order, rounded to `dtype`, is the product."""

    sums_SMN: Tensor
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        """The product."""
        total_MN, *others = self.sums_SMN
        for partial_MN in others:
            total_MN = total_MN + partial_MN
        return total_MN.to(self.dtype)


def added_up(x: Tensor | Partials) -> Tensor:
    """The product, whether its partials have been added up or not."""
    return x.tensor() if isinstance(x, Partials) else x
