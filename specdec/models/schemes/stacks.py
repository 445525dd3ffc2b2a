"""The tensors of a stack of matrices in 8 or 4 bits, such as one projection of all experts of a layer, filled part by part.

Scales of mxfp4 are kept as the exponents of powers of two that they are, in a byte each.  Knows no checkpoint and no product.

Shapes: N matrices, O rows of each, R = N * O rows, P rows of a part, I columns, J bytes of a row's codes, G groups of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.models.schemes.planes import KeptPlanes, unlike_planes
from specdec.models.schemes.rows import CodedRows
from specdec.ops.products.formats.experts import LANES, POWERS, StackedCodes, pack_steps, step_bytes, steps_of
from specdec.ops.products.formats.quantised import Kind


class StackPlanes(KeptPlanes):
    """The planes of a stack [N, O, I], uninitialised.  like: rows of it, which say what kind of codes and scales it has."""

    def __init__(self, count: int, rows: int, columns: int, like: CodedRows) -> None:
        super().__init__()
        self.kind: Kind = like.kind
        self.count, self.columns, self.group = count, columns, like.group
        self.scales_dtype, device = like.scales_PG.dtype, like.codes_PI.device
        self.has_powers = like.kind == "e2m1" and like.group == LANES  # nvfp4, whose scales are any, has groups of 16
        R, groups, steps = count * rows, like.scales_PG.shape[1], steps_of(columns)
        self.codes_RJ = self.plane(R, steps * step_bytes(like.kind), torch.uint8, device)
        if self.has_powers:
            self.scales_RG = self.plane(R, steps * POWERS, torch.uint8, device)
        else:
            self.scales_RG = self.plane(R, groups, self.scales_dtype, device)
        self.zeros_RG = None if like.zeros_PG is None else self.plane(R, groups, torch.int8, device)

    @property
    def weight(self) -> StackedCodes:
        return StackedCodes(
            self.kind, self.count, self.codes_RJ, self.scales_RG, self.zeros_RG, self.columns, self.group
        )  # fmt: skip

    def unlike(self, part: CodedRows) -> str:
        """Why a part can't lie in these planes; empty if it can."""
        return unlike_planes(self.kind, self.group, self.scales_dtype, self.zeros_RG is not None, part)

    def put(self, rows: slice, part: CodedRows) -> None:
        """Fills these rows, counted over all matrices."""
        with torch.no_grad():
            self.codes_RJ[rows].copy_(pack_steps(self.kind, part.codes_PI))
            if self.has_powers:
                self.scales_RG[rows] = 0  # of columns that are not there
                self.scales_RG[rows, : part.scales_PG.shape[1]] = exponents(part.scales_PG)
            else:
                self.scales_RG[rows].copy_(part.scales_PG)
            if self.zeros_RG is not None and part.zeros_PG is not None:
                self.zeros_RG[rows].copy_(part.zeros_PG)


def exponents(powers: Tensor) -> Tensor:
    """The byte e of each power of two 2^(e - 127), and 255 of NaN."""
    bytes_ = (torch.frexp(powers.float()).exponent + 126).clamp(0, 254).to(torch.uint8)
    return torch.where(powers.isnan(), 255, bytes_)
