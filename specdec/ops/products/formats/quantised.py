"""Weights of 8 or 4 bits: how dense values are quantised, where quantised values lie in memory, and how to dequantise them.

A weight is quantised values, a scale for each group of a row's columns (or for each whole row), and perhaps a zero point for
each group; a dense value is (quantised value - zero point) * scale.  Every checkpoint format is brought to this form, in which
rows are independent of each other.  This module knows no checkpoint and no kernel.

Shapes: N rows, K columns, J bytes of a row, G groups of a row.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Kind = Literal["e4m3", "int8", "int4", "e2m1"]
OFFSETS = {"int8": 128, "int4": 8}  # what is added to a signed integer to store it unsigned
E4M3_MAX = 448.0
TILE = 16  # columns that lie apart from each other's neighbours: see `pack`


class QuantisedMatrix(NamedTuple):
    """A weight [N, K].

    kind: what the bits of a quantised value mean.  e4m3: a float of 8 bits.  e2m1: one of 4 bits.  int8, int4: an integer,
        stored as integer + 128 or integer + 8.
    qweight_NJ: uint8, the quantised values as `pack` orders them.
    scales_NG: floats, [N, 1] for whole rows.
    zero_points_NG: int8, of integers alone: the signed integer that stands for 0.
    columns: K.
    group_size: columns of a scale; 0: all.
    """

    kind: Kind
    qweight_NJ: Tensor
    scales_NG: Tensor
    zero_points_NG: Tensor | None
    columns: int
    group_size: int


def pack_factor_of(kind: Kind) -> int:
    """How many quantised values lie in a word of 16 bits."""
    return 4 if kind in ("int4", "e2m1") else 2


def row_bytes(kind: Kind, columns: int) -> int:
    """J: the bytes of a row's quantised values, padding included."""
    return -(-columns // (TILE * pack_factor_of(kind))) * 2 * TILE


def pack(kind: Kind, qvalues_NK: Tensor) -> Tensor:
    """[N, J]: quantised values, given one a byte, as the kernels read them: in words of 16 bits, run after run of a row.

    A run of 32 columns (64 of 4 bits) becomes 16 words.  The first 16 columns are the lowest bits of these words, the next 16
    the bits above them, and so on.  So the values of a word belong to two tiles of a product (or four), a tile's neighbouring
    values come from neighbouring words, and two words in a register become pairs of dense values without moving one past
    another.
    """
    pack_factor, N = pack_factor_of(kind), qvalues_NK.shape[0]
    if pad := -qvalues_NK.shape[1] % (TILE * pack_factor):
        qvalues_NK = torch.nn.functional.pad(qvalues_NK, (0, pad))
    runs = qvalues_NK.view(N, -1, pack_factor, TILE).transpose(2, 3)  # [N, run, word, value of the word]
    return (runs if pack_factor == 2 else runs[..., ::2] | runs[..., 1::2] << 4).reshape(N, -1)


def unpack(kind: Kind, qweight_NJ: Tensor, columns: int) -> Tensor:
    """[N, K]: quantised values one a byte, from `pack`'s words."""
    pack_factor, N = pack_factor_of(kind), qweight_NJ.shape[0]
    runs = qweight_NJ.view(N, -1, TILE, 2)
    if pack_factor == 4:
        runs = torch.stack((runs & 15, runs >> 4), dim=-1).flatten(3)
    return runs.transpose(2, 3).reshape(N, -1)[:, :columns]


def unscaled(kind: Kind, qvalues: Tensor) -> Tensor:
    """Quantised values, given one a byte, as the floats or integers that they are, in float32: not scaled yet."""
    if kind == "e4m3":
        return qvalues.view(torch.float8_e4m3fn).float()
    if kind == "e2m1":
        bits = qvalues.int()  # no table: a captured graph could not copy one from the host
        exponent, fraction = bits >> 1 & 3, bits & 1
        quarters = torch.where(exponent == 0, fraction << 1, (fraction + 2) << exponent)
        magnitudes = quarters.float() / 4
        return torch.where(bits < 8, magnitudes, -magnitudes)
    return qvalues.float() - OFFSETS[kind]


def dequantise(weight: QuantisedMatrix, dtype: torch.dtype) -> Tensor:
    """The dense weight [N, K], computed in float32 (or a wider type) and rounded once."""
    qvalues_NK = unpack(weight.kind, weight.qweight_NJ, weight.columns)
    precise = torch.promote_types(torch.promote_types(dtype, torch.float32), weight.scales_NG.dtype)
    group_size = weight.group_size or weight.columns

    def spread(of_NG: Tensor) -> Tensor:
        return of_NG.repeat_interleave(group_size, dim=1)[:, : weight.columns].to(precise)

    dense_NK = unscaled(weight.kind, qvalues_NK).to(precise)
    if weight.zero_points_NG is not None:
        dense_NK -= spread(weight.zero_points_NG)
    return (dense_NK * spread(weight.scales_NG)).to(dtype)


def quantise(weight_NK: Tensor, kind: Kind, group_size: int) -> QuantisedMatrix:
    """The weight rounded to nearest: the largest magnitude of a group (0: a whole row) decides its scale.

    The integers' rule is compressed-tensors' for symmetric weights: a scale of 2 * largest / 15 for 4 bits.
    """
    assert kind in ("e4m3", "int4", "int8"), kind
    N, K = weight_NK.shape
    runs_NGg = weight_NK.float().unflatten(1, (-1, group_size or K))
    highest = {"e4m3": E4M3_MAX, "int8": 127.5, "int4": 7.5}[kind]
    # A GPU divides by a tensor, but multiplies by the reciprocal of a Python number, which would round ties unlike a CPU.
    scales_NG = runs_NGg.abs().amax(dim=2) / torch.tensor(highest, dtype=torch.float32, device=weight_NK.device)
    scales_NG = torch.where(scales_NG == 0, 1.0, scales_NG)
    scaled_NK = (runs_NGg / scales_NG[..., None]).view(N, K)
    if kind == "e4m3":
        qvalues_NK = scaled_NK.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        offset = OFFSETS[kind]
        qvalues_NK = (scaled_NK.round().clamp(-offset, offset - 1) + offset).to(torch.uint8)
    return QuantisedMatrix(kind, pack(kind, qvalues_NK), scales_NG, None, K, group_size)
