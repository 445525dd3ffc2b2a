"""Weights of 8 or 4 bits: how numbers become codes, where codes lie in memory, and which numbers they stand for.

A weight is codes, a scale for each group of a row's columns (or for each whole row), and perhaps a zero for each group; a
number is (value of the code - zero) * scale.  Every checkpoint format is brought to this form, in which rows are independent of
each other.  Knows no checkpoint and no kernel.

Shapes: O rows, I columns, J bytes of a row, G groups of a row.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["e4m3", "int8", "int4", "e2m1"]
OFFSETS = {"int8": 128, "int4": 8}  # a code of the value 0
E4M3_MAX = 448.0
PAIR = 32  # columns that lie in one run of 16 bytes, where codes have 4 bits


class Codes(NamedTuple):
    """A weight [O, I].

    kind: what a code's bits mean.  e4m3: a float of 8 bits.  e2m1: one of 4 bits.  int8, int4: value + 128, value + 8.
    codes_OJ: uint8; of 4 bits packed as `pack` does it.
    scales_OG: floats, [O, 1] for whole rows.
    zeros_OG: int8, of integers alone, relative to the code of 0.
    columns: I.
    group: columns of a scale; 0: all.
    """

    kind: Kind
    codes_OJ: Tensor
    scales_OG: Tensor
    zeros_OG: Tensor | None
    columns: int
    group: int


def is_packed(kind: Kind) -> bool:
    """Whether two codes lie in a byte."""
    return kind in ("int4", "e2m1")


def row_bytes(kind: Kind, columns: int) -> int:
    """J: the bytes of a row's codes."""
    return -(-columns // PAIR) * (PAIR // 2) if is_packed(kind) else columns


def pack(codes_OI: Tensor) -> Tensor:
    """[O, J]: codes of 4 bits, given one a byte, two a byte.

    A run of 32 columns becomes 16 bytes: the first 16 columns are the low nibbles, the others the high ones.  So the two
    numbers of a byte belong to two tiles of a product, and a tile's neighbouring numbers come from neighbouring bytes.
    """
    if pad := -codes_OI.shape[1] % PAIR:
        codes_OI = torch.nn.functional.pad(codes_OI, (0, pad))
    low, high = codes_OI.unflatten(1, (-1, 2, PAIR // 2)).unbind(dim=2)
    return (low | high << 4).flatten(1)


def unpack(codes_OJ: Tensor, columns: int) -> Tensor:
    """[O, I]: codes one a byte, from `pack`'s."""
    runs = codes_OJ.unflatten(1, (-1, PAIR // 2))
    return torch.stack((runs & 15, runs >> 4), dim=2).flatten(1)[:, :columns]


def values(kind: Kind, codes: Tensor) -> Tensor:
    """The numbers that codes, one a byte, stand for, in float32."""
    if kind == "e4m3":
        return codes.view(torch.float8_e4m3fn).float()
    if kind == "e2m1":
        magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=codes.device)
        return torch.cat((magnitudes, -magnitudes))[codes.int()]
    return codes.float() - OFFSETS[kind]


def dequantise(weight: Codes, dtype: torch.dtype) -> Tensor:
    """The weight [O, I], computed in float32 (or wider) and rounded once."""
    codes_OI = unpack(weight.codes_OJ, weight.columns) if is_packed(weight.kind) else weight.codes_OJ
    wide = torch.promote_types(torch.promote_types(dtype, torch.float32), weight.scales_OG.dtype)
    group = weight.group or weight.columns

    def spread(of_OG: Tensor) -> Tensor:
        return of_OG.repeat_interleave(group, dim=1)[:, : weight.columns].to(wide)

    numbers_OI = values(weight.kind, codes_OI).to(wide)
    if weight.zeros_OG is not None:
        numbers_OI -= spread(weight.zeros_OG)
    return (numbers_OI * spread(weight.scales_OG)).to(dtype)


def quantise(weight_OI: Tensor, kind: Kind, group: int) -> Codes:
    """The weight rounded to nearest: the largest magnitude of a group (0: a whole row) decides its scale.

    The integers' rule is compressed-tensors' for symmetric weights: a scale of 2 * largest / 15 for 4 bits.
    """
    assert kind in ("e4m3", "int4", "int8"), kind
    O, I = weight_OI.shape
    runs_OGg = weight_OI.float().unflatten(1, (-1, group or I))
    most = {"e4m3": E4M3_MAX, "int8": 127.5, "int4": 7.5}[kind]
    scales_OG = runs_OGg.abs().amax(dim=2) / most
    scales_OG = torch.where(scales_OG == 0, 1.0, scales_OG)
    scaled_OI = (runs_OGg / scales_OG[..., None]).view(O, I)
    if kind == "e4m3":
        codes_OI = scaled_OI.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        offset = OFFSETS[kind]
        codes_OI = (scaled_OI.round().clamp(-offset, offset - 1) + offset).to(torch.uint8)
    return Codes(kind, pack(codes_OI) if is_packed(kind) else codes_OI, scales_OG, None, I, group)
