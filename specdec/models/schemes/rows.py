"""Rows of a matrix as codes, one a byte, as every checkpoint format is brought to before it is stored.  Knows no file.

Shapes: P rows, I columns, G groups of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.ops.products.formats.quantised import Codes, Kind, dequantise, pack
from specdec.ops.products.quantised import restored


class CodedRows(NamedTuple):
    """See Codes, but that codes lie one a byte: codes_PI is uint8 [P, I].

    order_I: which of the matrix's columns each column of codes is, where groups are of columns that are no neighbours (GPTQ's
    act order); None: the same.
    """

    kind: Kind
    codes_PI: Tensor
    scales_PG: Tensor
    zeros_PG: Tensor | None
    group: int
    order_I: Tensor | None = None

    def arranged(self, arrange: Callable[[Tensor], Tensor]) -> CodedRows:
        """The rows in another order."""
        return self._replace(
            codes_PI=arrange(self.codes_PI),
            scales_PG=arrange(self.scales_PG),
            zeros_PG=None if self.zeros_PG is None else arrange(self.zeros_PG),
        )

    def run(self, dim: int, start: int, size: int) -> CodedRows:
        """Some of the rows, or some of the columns, which must be whole groups."""
        if dim == 0:
            return self.arranged(lambda plane: plane.narrow(0, start, size))
        if size == self.codes_PI.shape[1]:
            return self
        if self.order_I is not None:
            raise ValueError("ranks can't share columns in act order; nearest setting that works: tensor_parallel_size=1")
        own = self._replace(codes_PI=self.codes_PI.narrow(1, start, size))
        if not self.group:
            return own
        if start % self.group or size % self.group:
            raise ValueError(
                f"ranks can't share {self.codes_PI.shape[1]} columns in runs of {size}: a scale is for {self.group} columns; "
                "nearest setting that works: a smaller tensor_parallel_size"
            )
        first, groups = start // self.group, size // self.group
        zeros = None if self.zeros_PG is None else self.zeros_PG.narrow(1, first, groups)
        return own._replace(scales_PG=self.scales_PG.narrow(1, first, groups), zeros_PG=zeros)

    def packed(self) -> Codes:
        return Codes(
            self.kind, pack(self.kind, self.codes_PI), self.scales_PG, self.zeros_PG, self.codes_PI.shape[1], self.group
        )

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """[P, I]: what the codes stand for, rounded once, in the order of the matrix's columns."""
        return restored(dequantise(self.packed(), dtype), self.order_I)
