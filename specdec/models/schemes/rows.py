"""Rows of a quantised matrix, one value a byte: what every checkpoint format is brought to before it is stored.

This module knows no file.

Shapes: P rows, K columns, G groups of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.ops.products.formats.quantised import Kind, QuantisedMatrix, dequantise, pack
from specdec.ops.products.quantised import in_model_order


class QuantisedRows(NamedTuple):
    """As QuantisedMatrix, but with each quantised value in a byte of its own: qvalues_PK is uint8 [P, K].

    order_K: which of the model's columns each column of qvalues_PK is, where a group's columns are no neighbours (GPTQ's act
    order); None: the same.
    """

    kind: Kind
    qvalues_PK: Tensor
    scales_PG: Tensor
    zero_points_PG: Tensor | None
    group_size: int
    order_K: Tensor | None = None

    def arranged(self, arrange: Callable[[Tensor], Tensor]) -> QuantisedRows:
        """The rows in another order."""
        return self._replace(
            qvalues_PK=arrange(self.qvalues_PK),
            scales_PG=arrange(self.scales_PG),
            zero_points_PG=None if self.zero_points_PG is None else arrange(self.zero_points_PG),
        )

    def run(self, dim: int, start: int, size: int) -> QuantisedRows:
        """Some of the rows, or some of the columns, which must be whole groups."""
        if dim == 0:
            return self.arranged(lambda parameter: parameter.narrow(0, start, size))
        if size == self.qvalues_PK.shape[1]:
            return self
        if self.order_K is not None:
            raise ValueError("ranks can't share columns in act order; nearest setting that works: tensor_parallel_size=1")
        own = self._replace(qvalues_PK=self.qvalues_PK.narrow(1, start, size))
        if not self.group_size:
            return own
        if start % self.group_size or size % self.group_size:
            raise ValueError(
                f"ranks can't share {self.qvalues_PK.shape[1]} columns in runs of {size}: a scale is for {self.group_size} "
                "columns; nearest setting that works: a smaller tensor_parallel_size"
            )
        first, groups = start // self.group_size, size // self.group_size
        zero_points = None if self.zero_points_PG is None else self.zero_points_PG.narrow(1, first, groups)
        return own._replace(scales_PG=self.scales_PG.narrow(1, first, groups), zero_points_PG=zero_points)

    def packed(self) -> QuantisedMatrix:
        qweight_PJ = pack(self.kind, self.qvalues_PK)
        return QuantisedMatrix(
            self.kind, qweight_PJ, self.scales_PG, self.zero_points_PG, self.qvalues_PK.shape[1], self.group_size
        )  # fmt: skip

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[P, K]: the dequantised rows, rounded once, in the order of the model's columns."""
        return in_model_order(dequantise(self.packed(), dtype), self.order_K)
