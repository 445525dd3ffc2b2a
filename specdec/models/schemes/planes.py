"""The tensors of a matrix in 8 or 4 bits: codes, scales and zeros, filled part by part; or of one that is packed.

Knows no checkpoint and no product.

Shapes: O rows, P rows of a part, I columns, J bytes of a row's codes, G groups of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from specdec.models.schemes.rows import CodedRows
from specdec.ops.products.formats.lossless import Packed
from specdec.ops.products.formats.quantised import Codes, Kind, row_bytes


class KeptPlanes(nn.Module):
    """Planes that a module's change of dtype leaves as they are: their numbers are codes, or exact as they were stored.

    The planes are parameters, so that whoever counts a model's bytes counts them.
    """

    @staticmethod
    def plane(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
        return nn.Parameter(torch.empty(rows, width, dtype=dtype, device=device), requires_grad=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        def moved(plane: Tensor) -> Tensor:
            changed = fn(plane)
            return changed if changed.dtype == plane.dtype else plane.to(changed.device)

        result: Self = super()._apply(moved, recurse)
        return result


def unlike_planes(kind: Kind, group: int, scales: torch.dtype, has_zeros: bool, part: CodedRows) -> str:
    """Why a part can't lie in planes of that kind of codes; empty if it can."""
    own: dict[str, tuple[Any, Any]] = {
        "codes": (kind, part.kind),
        "columns of a scale": (group or "all", part.group or "all"),
        "scales in": (scales, part.scales_PG.dtype),
        "zeros": (has_zeros, part.zeros_PG is not None),
    }
    return ", ".join(f"{name} {one} and {other}" for name, (one, other) in own.items() if one != other)


class Planes(KeptPlanes):
    """The planes of a matrix [O, I], uninitialised.  like: rows of it, which say what kind of codes and scales it has."""

    def __init__(self, rows: int, columns: int, like: CodedRows) -> None:
        super().__init__()
        self.kind: Kind = like.kind
        self.columns, self.group = columns, like.group
        groups, device = like.scales_PG.shape[1], like.codes_PI.device
        self.codes_OJ = self.plane(rows, row_bytes(like.kind, columns), torch.uint8, device)
        self.scales_OG = self.plane(rows, groups, like.scales_PG.dtype, device)
        self.zeros_OG = None if like.zeros_PG is None else self.plane(rows, groups, torch.int8, device)
        self.order_I: Tensor | None
        self.register_buffer("order_I", like.order_I)

    @property
    def weight(self) -> Codes:
        """Its columns are sorted as order_I says."""
        return Codes(self.kind, self.codes_OJ, self.scales_OG, self.zeros_OG, self.columns, self.group)

    def unlike(self, part: CodedRows) -> str:
        """Why a part can't lie in these planes; empty if it can."""
        unlike = unlike_planes(self.kind, self.group, self.scales_OG.dtype, self.zeros_OG is not None, part)
        if unlike or (self.order_I is None and part.order_I is None):
            return unlike
        if self.order_I is not None and part.order_I is not None and torch.equal(self.order_I, part.order_I):
            return ""
        return (
            "columns in another order than those of the part before (g_idx); nearest thing that works: a checkpoint whose "
            "parts were quantised together, or without act order"
        )

    def put(self, rows: slice, part: CodedRows) -> None:
        """Fills the rows of a part."""
        weight = part.packed()
        with torch.no_grad():
            self.codes_OJ[rows].copy_(weight.codes_OJ)
            self.scales_OG[rows].copy_(weight.scales_OG)
            if self.zeros_OG is not None and weight.zeros_OG is not None:
                self.zeros_OG[rows].copy_(weight.zeros_OG)


class PackedPlanes(KeptPlanes):
    """The planes of a packed matrix.  They are buffers: copies, and no weights of the model."""

    def __init__(self, packed: Packed) -> None:
        super().__init__()
        for name, plane in packed._asdict().items():
            self.register_buffer(name, plane, persistent=False)

    @property
    def weight(self) -> Packed:
        return Packed(*(self.get_buffer(name) for name in Packed._fields))
