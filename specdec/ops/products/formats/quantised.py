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
TILE = 16  # columns that lie apart from each other's neighbours: see `pack`


class Codes(NamedTuple):
    """A weight [O, I].

    kind: what a code's bits mean.  e4m3: a float of 8 bits.  e2m1: one of 4 bits.  int8, int4: value + 128, value + 8.
    codes_OJ: uint8, as `pack` orders them.
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


def codes_a_word(kind: Kind) -> int:
    """How many codes lie in a word of 16 bits."""
    return 4 if kind in ("int4", "e2m1") else 2


def row_bytes(kind: Kind, columns: int) -> int:
    """J: the bytes of a row's codes, padding included."""
    return -(-columns // (TILE * codes_a_word(kind))) * 2 * TILE


def pack(kind: Kind, codes_OI: Tensor) -> Tensor:
    """[O, J]: codes, given one a byte, as the kernels read them: in words of 16 bits, 16 words of a row after each other.

    A run of 32 columns (64 of 4 bits) becomes 16 words.  The first 16 columns are the lowest bits of these words, the next 16
    the bits above them, and so on.  So the numbers of a word belong to two tiles of a product (or four), a tile's neighbouring
    numbers come from neighbouring words, and two words in a register become pairs of numbers without moving one past another.
    """
    a_word, O = codes_a_word(kind), codes_OI.shape[0]
    if pad := -codes_OI.shape[1] % (TILE * a_word):
        codes_OI = torch.nn.functional.pad(codes_OI, (0, pad))
    runs = codes_OI.view(O, -1, a_word, TILE).transpose(2, 3)  # [O, run, word, code of the word]
    return (runs if a_word == 2 else runs[..., ::2] | runs[..., 1::2] << 4).reshape(O, -1)


def unpack(kind: Kind, codes_OJ: Tensor, columns: int) -> Tensor:
    """[O, I]: codes one a byte, from `pack`'s."""
    a_word, O = codes_a_word(kind), codes_OJ.shape[0]
    runs = codes_OJ.view(O, -1, TILE, 2)
    if a_word == 4:
        runs = torch.stack((runs & 15, runs >> 4), dim=-1).flatten(3)
    return runs.transpose(2, 3).reshape(O, -1)[:, :columns]


def values(kind: Kind, codes: Tensor) -> Tensor:
    """The numbers that codes, one a byte, stand for, in float32."""
    if kind == "e4m3":
        return codes.view(torch.float8_e4m3fn).float()
    if kind == "e2m1":
        code = codes.int()  # no table: a captured graph could not copy one from the host
        exponent, fraction = code >> 1 & 3, code & 1
        quarters = torch.where(exponent == 0, fraction << 1, (fraction + 2) << exponent)
        magnitudes = quarters.float() / 4
        return torch.where(code < 8, magnitudes, -magnitudes)
    return codes.float() - OFFSETS[kind]


def dequantise(weight: Codes, dtype: torch.dtype) -> Tensor:
    """The weight [O, I], computed in float32 (or wider) and rounded once."""
    codes_OI = unpack(weight.kind, weight.codes_OJ, weight.columns)
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
    # A GPU multiplies with the reciprocal of a Python number: codes of ties would not be a CPU's.  By a tensor it divides.
    scales_OG = runs_OGg.abs().amax(dim=2) / torch.tensor(most, dtype=torch.float32, device=weight_OI.device)
    scales_OG = torch.where(scales_OG == 0, 1.0, scales_OG)
    scaled_OI = (runs_OGg / scales_OG[..., None]).view(O, I)
    if kind == "e4m3":
        codes_OI = scaled_OI.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        offset = OFFSETS[kind]
        codes_OI = (scaled_OI.round().clamp(-offset, offset - 1) + offset).to(torch.uint8)
    return Codes(kind, pack(kind, codes_OI), scales_OG, None, I, group)
