"""The tensors of a stack of matrices in 8 or 4 bits, such as one projection of all experts of a layer, filled part by part.

Scales of mxfp4 are kept as the exponents of powers of two that they are, in a byte each.  This module knows no checkpoint and
no product.

Shapes: E experts, N rows of each one's matrix, R = E * N rows, P rows of a part, K columns, J bytes of a row's quantised
values, G groups of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.models.schemes.parameters import KeptParameters, unlike_parameters
from specdec.models.schemes.rows import QuantisedRows
from specdec.ops.products.formats.experts import LANES, POWERS, QuantisedStack, pack_steps, step_bytes, steps_of
from specdec.ops.products.formats.quantised import Kind


class StackParameters(KeptParameters):
    """The parameters of a stack [E, N, K], uninitialised.  like: rows of it, which say how they are quantised."""

    def __init__(self, count: int, rows: int, columns: int, like: QuantisedRows) -> None:
        super().__init__()
        self.kind: Kind = like.kind
        self.count, self.columns, self.group_size = count, columns, like.group_size
        self.scales_dtype, device = like.scales_PG.dtype, like.qvalues_PK.device
        self.has_powers = like.kind == "e2m1" and like.group_size == LANES  # nvfp4, whose scales are any, has groups of 16
        R, groups, steps = count * rows, like.scales_PG.shape[1], steps_of(columns)
        self.qweight_RJ = self.new(R, steps * step_bytes(like.kind), torch.uint8, device)
        if self.has_powers:
            self.scales_RG = self.new(R, steps * POWERS, torch.uint8, device)
        else:
            self.scales_RG = self.new(R, groups, self.scales_dtype, device)
        self.zero_points_RG = None if like.zero_points_PG is None else self.new(R, groups, torch.int8, device)

    @property
    def weight(self) -> QuantisedStack:
        return QuantisedStack(
            self.kind, self.count, self.qweight_RJ, self.scales_RG, self.zero_points_RG, self.columns, self.group_size
        )  # fmt: skip

    def unlike(self, part: QuantisedRows) -> str:
        """Why a part can't be stored here; empty if it can."""
        return unlike_parameters(self.kind, self.group_size, self.scales_dtype, self.zero_points_RG is not None, part)

    def put(self, rows: slice, part: QuantisedRows) -> None:
        """Fills these rows, counted over all matrices."""
        with torch.no_grad():
            self.qweight_RJ[rows].copy_(pack_steps(self.kind, part.qvalues_PK))
            if self.has_powers:
                self.scales_RG[rows] = 0  # of columns that are not there
                self.scales_RG[rows, : part.scales_PG.shape[1]] = exponents(part.scales_PG)
            else:
                self.scales_RG[rows].copy_(part.scales_PG)
            if self.zero_points_RG is not None and part.zero_points_PG is not None:
                self.zero_points_RG[rows].copy_(part.zero_points_PG)


def exponents(powers: Tensor) -> Tensor:
    """The byte e of each power of two 2^(e - 127), and 255 of NaN."""
    bytes_ = (torch.frexp(powers.float()).exponent + 126).clamp(0, 254).to(torch.uint8)
    return torch.where(powers.isnan(), 255, bytes_)
