"""The tensors of a matrix in 8 or 4 bits, filled part by part: quantised values, scales and zero points.

A matrix that is kept in 12 bits without loss has its tensors here too.  This module knows no checkpoint and no product.

Shapes: N rows, P rows of a part, K columns, J bytes of a row's quantised values, G groups of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from specdec.models.schemes.rows import QuantisedRows
from specdec.ops.products.formats.lossless import LosslessMatrix
from specdec.ops.products.formats.quantised import Kind, QuantisedMatrix, row_bytes


class KeptParameters(nn.Module):
    """Tensors whose dtypes a module's change of dtype leaves alone: other dtypes would change what their values mean.

    They are parameters, so that whoever counts a model's bytes counts them.
    """

    @staticmethod
    def new(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
        return nn.Parameter(torch.empty(rows, width, dtype=dtype, device=device), requires_grad=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def moved(tensor: Tensor) -> Tensor:
            changed = fn(tensor)
            return changed if changed.dtype == tensor.dtype else tensor.to(changed.device)

        result: Self = super()._apply(moved, recurse)
        return result


def unlike_parameters(kind: Kind, group_size: int, scales: torch.dtype, has_zero_points: bool, part: QuantisedRows) -> str:
    """Why a part can't be stored beside parts of that kind; empty if it can."""
    own: dict[str, tuple[Any, Any]] = {
        "quantised values": (kind, part.kind),
        "columns of a scale": (group_size or "all", part.group_size or "all"),
        "scales in": (scales, part.scales_PG.dtype),
        "zero points": (has_zero_points, part.zero_points_PG is not None),
    }
    return ", ".join(f"{name} {one} and {other}" for name, (one, other) in own.items() if one != other)


class QuantisedParameters(KeptParameters):
    """The parameters of a matrix [N, K], uninitialised.  like: rows of it, which say how they are quantised."""

    def __init__(self, rows: int, columns: int, like: QuantisedRows) -> None:
        super().__init__()
        self.kind: Kind = like.kind
        self.columns, self.group_size = columns, like.group_size
        groups, device = like.scales_PG.shape[1], like.qvalues_PK.device
        self.qweight_NJ = self.new(rows, row_bytes(like.kind, columns), torch.uint8, device)
        self.scales_NG = self.new(rows, groups, like.scales_PG.dtype, device)
        self.zero_points_NG = None if like.zero_points_PG is None else self.new(rows, groups, torch.int8, device)
        self.order_K: Tensor | None
        self.register_buffer("order_K", like.order_K)

    @property
    def weight(self) -> QuantisedMatrix:
        """Its columns are sorted as order_K says."""
        return QuantisedMatrix(self.kind, self.qweight_NJ, self.scales_NG, self.zero_points_NG, self.columns, self.group_size)

    def unlike(self, part: QuantisedRows) -> str:
        """Why a part can't be stored here; empty if it can."""
        unlike = unlike_parameters(self.kind, self.group_size, self.scales_NG.dtype, self.zero_points_NG is not None, part)
        if unlike or (self.order_K is None and part.order_K is None):
            return unlike
        if self.order_K is not None and part.order_K is not None and torch.equal(self.order_K, part.order_K):
            return ""
        return (
            "columns in another order than those of the part before (g_idx); nearest thing that works: a checkpoint whose "
            "parts were quantised together, or without act order"
        )

    def put(self, rows: slice, part: QuantisedRows) -> None:
        """Fills the rows of a part."""
        weight = part.packed()
        with torch.no_grad():
            self.qweight_NJ[rows].copy_(weight.qweight_NJ)
            self.scales_NG[rows].copy_(weight.scales_NG)
            if self.zero_points_NG is not None and weight.zero_points_NG is not None:
                self.zero_points_NG[rows].copy_(weight.zero_points_NG)


class LosslessParameters(KeptParameters):
    """The tensors of a matrix in 12 bits.  They are buffers: copies, and no weights of the model."""

    def __init__(self, matrix: LosslessMatrix) -> None:
        super().__init__()
        for name, tensor in matrix._asdict().items():
            self.register_buffer(name, tensor, persistent=False)

    @property
    def weight(self) -> LosslessMatrix:
        return LosslessMatrix(*(self.get_buffer(name) for name in LosslessMatrix._fields))
