"""The tensors of a matrix in 8 or 4 bits: codes, scales and zeros, filled part by part.  Knows no checkpoint and no product.

Shapes: O rows, P rows of a part, I columns, J bytes of a row's codes, G groups of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from specdec.models.schemes.rows import CodedRows
from specdec.ops.quantised.codes import Codes, Kind, row_bytes


class Planes(nn.Module):
    """The planes of a matrix [O, I], uninitialised.  like: rows of it, which say what kind of codes, scales and zeros it has.

    The planes are parameters, so that whoever counts a model's bytes counts them.
    """

    def __init__(self, rows: int, columns: int, like: CodedRows) -> None:
        super().__init__()
        self.kind: Kind = like.kind
        self.columns, self.group = columns, like.group
        groups, device = like.scales_PG.shape[1], like.codes_PI.device

        def plane(width: int, dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(rows, width, dtype=dtype, device=device), requires_grad=False)

        self.codes_OJ = plane(row_bytes(like.kind, columns), torch.uint8)
        self.scales_OG = plane(groups, like.scales_PG.dtype)
        self.zeros_OG = None if like.zeros_PG is None else plane(groups, torch.int8)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """A module's change of dtype leaves planes as they are: their numbers are codes, or exact as they were stored."""

        def moved(plane: Tensor) -> Tensor:
            changed = fn(plane)
            return changed if changed.dtype == plane.dtype else plane.to(changed.device)

        result: Self = super()._apply(moved, recurse)
        return result

    @property
    def weight(self) -> Codes:
        return Codes(self.kind, self.codes_OJ, self.scales_OG, self.zeros_OG, self.columns, self.group)

    def unlike(self, part: CodedRows) -> str:
        """Why a part can't lie in these planes; empty if it can."""
        own: dict[str, tuple[Any, Any]] = {
            "codes": (self.kind, part.kind),
            "columns of a scale": (self.group or "all", part.group or "all"),
            "scales in": (self.scales_OG.dtype, part.scales_PG.dtype),
            "zeros": (self.zeros_OG is not None, part.zeros_PG is not None),
        }
        return ", ".join(f"{name} {one} and {other}" for name, (one, other) in own.items() if one != other)

    def put(self, rows: slice, part: CodedRows) -> None:
        """Fills the rows of a part."""
        weight = part.packed()
        with torch.no_grad():
            self.codes_OJ[rows].copy_(weight.codes_OJ)
            self.scales_OG[rows].copy_(weight.scales_OG)
            if self.zeros_OG is not None and weight.zeros_OG is not None:
                self.zeros_OG[rows].copy_(weight.zeros_OG)
