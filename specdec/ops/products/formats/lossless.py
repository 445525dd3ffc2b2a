"""Weights in bfloat16 packed into 12 bits a number, without loss: which bits lie where, and how they become numbers again.

A number has a sign, 8 bits of exponent and 7 of fraction.  In a trained matrix (or a random one) nearly all exponents of a row
are 16 neighbouring values, so 4 bits say which: how far above the row's base.  The rare other numbers, most of them tiny, are
far numbers.  Where one belongs, the codes have the smallest number that they can say, and a list has the far number and its
column.  A product adds, for each far number, what it differs by.  So every number comes back with all of its bits.  (A product
with an infinite x is infinite or no number then, as it is with infinite weights.)

DFloat11 (arXiv 2504.11651) and ZipServ (arXiv 2603.17435) rest on the same observation, with codes of other lengths.  This
module knows no checkpoint and no kernel.

Shapes: O rows, E eighths of them, I columns, J bytes of a row's codes, N far numbers of all rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.ops.products.formats.quantised import pack, unpack

WIDTH = 128  # columns: a weight whose width is no multiple of them is not packed
EIGHT = 8  # rows that kernels read together: a matrix whose rows are no multiple of them is not packed
EXPONENTS = 16  # that 4 bits can say
MAX_FAR = 64  # of a row: a product reads them one after the other
AT_ONCE = 2**24  # numbers that are packed at once, whose exponents take 8 bytes each meanwhile


class Packed(NamedTuple):
    """A weight [O, I] in bfloat16.

    low_OJ: uint8, signs (bit 7) and fractions, as `quantised.pack` orders 8 bits.
    high_OJ: uint8, exponents above the row's base, as `quantised.pack` orders 4 bits.
    bases_O: int16, the bits of the number whose exponent is the row's base and whose sign and fraction are 0: what the codes
        have in place of a far number.
    starts: int32, [O + 1], where each row's far numbers begin in the lists, and where the last row's end.
    columns_N: int32.
    far_N: int16, the bits of the numbers, row by row.
    most_E: int32, [O / 8], the most far numbers that one of 8 rows has.
    """

    low_OJ: Tensor
    high_OJ: Tensor
    bases_O: Tensor
    starts: Tensor
    columns_N: Tensor
    far_N: Tensor
    most_E: Tensor

    @property
    def rows(self) -> int:
        return self.low_OJ.shape[0]

    @property
    def columns(self) -> int:
        return self.low_OJ.shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(plane.numel() * plane.element_size() for plane in self)


def packed_size(rows: int, columns: int) -> int:
    """The bytes of a packed weight without far numbers, of which each takes 6."""
    return rows * (columns * 3 // 2 + 6) + 4 + -(-rows // EIGHT) * 4


def pack_weight(weight_OI: Tensor) -> Packed | None:
    """The weight packed; None if it is not in bfloat16, its width no multiple of WIDTH, or a row has too many far numbers."""
    O, I = weight_OI.shape
    if weight_OI.dtype != torch.bfloat16 or I % WIDTH or not O * I:
        return None
    pieces = [_pack_rows(rows_RI) for rows_RI in weight_OI.detach().split(max(1, AT_ONCE // I))]
    low_OJ, high_OJ, bases_O, count_O, columns_N, far_N = (torch.cat(planes) for planes in zip(*pieces))
    if count_O.max() > MAX_FAR:
        return None
    starts = torch.nn.functional.pad(count_O.cumsum(0), (1, 0)).int()
    most_E = torch.nn.functional.pad(count_O, (0, -O % EIGHT)).view(-1, EIGHT).amax(1).int()
    return Packed(low_OJ, high_OJ, bases_O, starts, columns_N, far_N, most_E)


def _pack_rows(rows_RI: Tensor) -> tuple[Tensor, ...]:
    """low, high, bases, how many far numbers each row has, their columns, and the far numbers."""
    bits_RI = rows_RI.contiguous().view(torch.int16)
    exponents_RI = (bits_RI >> 7 & 255).long()
    of_exponent = torch.zeros(len(rows_RI), 257, dtype=torch.int32, device=rows_RI.device)
    ones = torch.ones((), dtype=torch.int32, device=rows_RI.device).expand_as(exponents_RI)
    below = of_exponent.scatter_add_(1, exponents_RI + 1, ones).cumsum(1)  # numbers with smaller exponents
    base_R = (below[:, EXPONENTS:] - below[:, :-EXPONENTS]).argmax(1)  # from there on are most of the row's exponents
    above_RI = exponents_RI - base_R[:, None]
    is_far_RI = (above_RI < 0) | (above_RI >= EXPONENTS)
    low_RI = (bits_RI >> 8 & 128 | bits_RI & 127).masked_fill(is_far_RI, 0).to(torch.uint8)
    high_RI = above_RI.masked_fill(is_far_RI, 0).to(torch.uint8)
    columns_N = is_far_RI.nonzero()[:, 1].int()
    return pack("int8", low_RI), pack("int4", high_RI), (base_R << 7).short(), is_far_RI.sum(1), columns_N, bits_RI[is_far_RI]


def unpack_weight(weight: Packed) -> Tensor:
    """The weight [O, I], bit for bit."""
    low_OI = unpack("int8", weight.low_OJ, weight.columns).int()
    high_OI = unpack("int4", weight.high_OJ, weight.columns).int()
    bits_OI = (low_OI & 128) << 8 | low_OI & 127 | weight.bases_O.int()[:, None] + (high_OI << 7)
    bits_OI = bits_OI.short()
    rows_N = torch.arange(weight.rows, dtype=torch.int64, device=low_OI.device).repeat_interleave(weight.starts.diff())
    bits_OI[rows_N, weight.columns_N.long()] = weight.far_N
    return bits_OI.view(torch.bfloat16)
