"""bfloat16 weights in 12 bits a value, without loss: which bits lie where, and how they become values again.

A value has a sign, 8 bits of exponent and 7 of fraction.  In a trained matrix (or a random one) nearly all exponents of a row
are 16 neighbouring values, so 4 bits say which: how far above the row's base.  The other values, rare and mostly tiny, are
outliers.  In an outlier's place the 12 bits say the smallest value that they can, and a list has the outlier and its column.  A
product adds, for each outlier, the difference between the two.  So every value comes back with all of its bits.  (A product
with an infinite x is infinite or NaN then, as it is with infinite weights.)

DFloat11 (arXiv 2504.11651) and ZipServ (arXiv 2603.17435) rest on the same observation, with other numbers of bits.  This
module knows no checkpoint and no kernel.

Shapes: N rows, E eighths of them, K columns, J bytes of a row, X outliers of all rows, R rows of a piece.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.ops.products.formats.quantised import pack, unpack

ALIGN_N, ALIGN_K = 8, 128  # rows and columns: a matrix of which one is no multiple of these is not kept in 12 bits
EXPONENTS = 16  # that 4 bits can say
MAX_OUTLIERS = 64  # of a row: a product reads them one after the other
AT_ONCE = 2**24  # values that are converted at once, whose exponents take 8 bytes each meanwhile


class LosslessMatrix(NamedTuple):
    """A bfloat16 weight [N, K] in 12 bits a value.

    low_NJ: uint8, signs (bit 7) and fractions, as `quantised.pack` orders 8 bits.
    high_NJ: uint8, exponents above the row's base, as `quantised.pack` orders 4 bits.
    bases_N: int16, the bits of the value whose exponent is the row's base and whose sign and fraction are 0: what the 12 bits
        say in an outlier's place.
    starts: int32, [N + 1], where each row's outliers begin in the lists, and where the last row's end.
    columns_X: int32, the outliers' columns.
    outliers_X: int16, the bits of the outliers, row by row.
    max_outliers_E: int32, [N / 8], the most outliers that one of 8 rows has.
    """

    low_NJ: Tensor
    high_NJ: Tensor
    bases_N: Tensor
    starts: Tensor
    columns_X: Tensor
    outliers_X: Tensor
    max_outliers_E: Tensor

    @property
    def rows(self) -> int:
        return self.low_NJ.shape[0]

    @property
    def columns(self) -> int:
        return self.low_NJ.shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self)


def lossless_bytes(rows: int, columns: int) -> int:
    """The bytes of a lossless weight without outliers, of which each takes 6."""
    return rows * (columns * 3 // 2 + 6) + 4 + -(-rows // ALIGN_N) * 4


def encode_lossless(weight_NK: Tensor) -> LosslessMatrix | None:
    """The weight in 12 bits; None if it is not in bfloat16, K is no multiple of ALIGN_K, or a row has too many outliers."""
    N, K = weight_NK.shape
    if weight_NK.dtype != torch.bfloat16 or K % ALIGN_K or not N * K:
        return None
    pieces = [_encode_rows(rows_RK) for rows_RK in weight_NK.detach().split(max(1, AT_ONCE // K))]
    low_NJ, high_NJ, bases_N, count_N, columns_X, outliers_X = (torch.cat(buffers) for buffers in zip(*pieces))
    if count_N.max() > MAX_OUTLIERS:
        return None
    starts = torch.nn.functional.pad(count_N.cumsum(0), (1, 0)).int()
    max_outliers_E = torch.nn.functional.pad(count_N, (0, -N % ALIGN_N)).view(-1, ALIGN_N).amax(1).int()
    return LosslessMatrix(low_NJ, high_NJ, bases_N, starts, columns_X, outliers_X, max_outliers_E)


def _encode_rows(rows_RK: Tensor) -> tuple[Tensor, ...]:
    """low, high, bases, how many outliers each row has, their columns, and the outliers."""
    bits_RK = rows_RK.contiguous().view(torch.int16)
    exponents_RK = (bits_RK >> 7 & 255).long()
    of_exponent = torch.zeros(len(rows_RK), 257, dtype=torch.int32, device=rows_RK.device)
    ones = torch.ones((), dtype=torch.int32, device=rows_RK.device).expand_as(exponents_RK)
    below = of_exponent.scatter_add_(1, exponents_RK + 1, ones).cumsum(1)  # values with smaller exponents
    base_R = (below[:, EXPONENTS:] - below[:, :-EXPONENTS]).argmax(1)  # from there on are most of the row's exponents
    above_RK = exponents_RK - base_R[:, None]
    is_outlier_RK = (above_RK < 0) | (above_RK >= EXPONENTS)
    low_RK = (bits_RK >> 8 & 128 | bits_RK & 127).masked_fill(is_outlier_RK, 0).to(torch.uint8)
    high_RK = above_RK.masked_fill(is_outlier_RK, 0).to(torch.uint8)
    columns_X, count_R = is_outlier_RK.nonzero()[:, 1].int(), is_outlier_RK.sum(1)
    bases_R = (base_R << 7).short()
    return pack("int8", low_RK), pack("int4", high_RK), bases_R, count_R, columns_X, bits_RK[is_outlier_RK]


def decode_lossless(weight: LosslessMatrix) -> Tensor:
    """The weight [N, K], bit for bit."""
    low_NK = unpack("int8", weight.low_NJ, weight.columns).int()
    high_NK = unpack("int4", weight.high_NJ, weight.columns).int()
    bits_NK = (low_NK & 128) << 8 | low_NK & 127 | weight.bases_N.int()[:, None] + (high_NK << 7)
    bits_NK = bits_NK.short()
    rows_X = torch.arange(weight.rows, dtype=torch.int64, device=low_NK.device).repeat_interleave(weight.starts.diff())
    bits_NK[rows_X, weight.columns_X.long()] = weight.outliers_X
    return bits_NK.view(torch.bfloat16)
