"""Stacks of matrices in 8 or 4 bits, one for each expert of a layer: where their codes and scales lie in memory.

The numbers are those of ops/products/formats/quantised.py: (value of the code - zero) * scale.  Only the places of codes and
scales differ, as the kernel in kernels/experts/mixture_triton.py reads them.

Shapes: N matrices, O rows of each, R = N * O rows, I columns, S steps of a row, J bytes of a row, G groups of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.ops.products.formats.quantised import Kind, codes_a_word, values

STEP = 128  # columns that a program multiplies at once; rows are padded to a multiple of it
LANES = 32  # columns that lie in neighbouring words
POWERS = 4  # scales of a step where each 32 columns have a power of two

# Where the four bits of each of a word's e2m1 codes lie, the lowest first: the first code's as bfloat16 has them, so that it
# takes one step of the GPU to find it, two steps for the next two, and more for the fourth, which has the bits that are left.
E2M1_BITS = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (10, 11, 13, 14))


class StackedCodes(NamedTuple):
    """Matrices [N, O, I].

    matrices: N.
    codes_RJ: uint8, as `pack_steps` orders them.
    scales_RG: floats; [R, 1] where a row has one scale; uint8 exponents of powers of two (2^(e - 127)), [R, S * POWERS], of
        groups of 32 columns.
    zeros_RG: int8, relative to the code of 0.
    columns: I.
    group: columns of a scale; 0: all.
    """

    kind: Kind
    matrices: int
    codes_RJ: Tensor
    scales_RG: Tensor
    zeros_RG: Tensor | None
    columns: int
    group: int

    @property
    def rows(self) -> int:
        """O."""
        return self.codes_RJ.shape[0] // self.matrices

    @property
    def has_powers(self) -> bool:
        return self.scales_RG.dtype == torch.uint8

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """[N, O, I], in that dtype."""
        return dequantise_stack(self, dtype)

    def chosen(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """The matrices of these numbers [..., O, I]."""
        return dequantise_stack(chosen_of(self, ids), dtype).unflatten(0, ids.shape)


def scales_form(kind: Kind, group: int) -> str:
    """Where the kernel finds scales of groups of so many columns; empty: it can't read them.

    "row": one a row.  "step": one for each step or several.  "parts": one for each 32 or 64 columns.  "powers": one for each
    32, powers of two, of which a step's are one word.
    """
    if group == 0:
        return "row"
    if kind == "e2m1":
        return "powers" if group == LANES else ""
    if group % STEP == 0:
        return "step"
    return "parts" if kind == "int4" and group in (LANES, 2 * LANES) else ""


def steps_of(columns: int) -> int:
    """S."""
    return -(-columns // STEP)


def step_bytes(kind: Kind) -> int:
    """Bytes of a row's codes for a step."""
    return 2 * STEP // codes_a_word(kind)


def pack_steps(kind: Kind, codes_RI: Tensor) -> Tensor:
    """[R, J]: codes, given one a byte, in words of 16 bits.

    A run of 64 columns (128 of 4 bits) becomes 32 words: the first 32 columns are the lowest bits of these words, the next 32
    the bits above them, and so on.  So the numbers of a word belong to different tiles of a product, and each tile has
    neighbouring columns, which have one scale.  The bits of e2m1 codes are spread as E2M1_BITS says.
    """
    a_word, rows = codes_a_word(kind), codes_RI.shape[0]
    if pad := -codes_RI.shape[1] % STEP:
        codes_RI = torch.nn.functional.pad(codes_RI, (0, pad))
    runs = codes_RI.view(rows, -1, a_word, LANES).transpose(2, 3)  # [R, run, word, code of the word]
    if kind == "e2m1":
        words = torch.zeros(runs.shape[:-1], dtype=torch.int32, device=runs.device)
        for code, places in zip(runs.unbind(-1), E2M1_BITS):
            for bit, place in enumerate(places):
                words |= (code.int() >> bit & 1) << place
        return torch.stack((words & 255, words >> 8), dim=-1).to(torch.uint8).reshape(rows, -1)
    return (runs if a_word == 2 else runs[..., ::2] | runs[..., 1::2] << 4).reshape(rows, -1)


def unpack_steps(kind: Kind, codes_RJ: Tensor, columns: int) -> Tensor:
    """[R, I]: codes one a byte, from `pack_steps`'s."""
    runs = codes_RJ.view(codes_RJ.shape[0], -1, LANES, 2)
    if kind == "e2m1":
        words = runs[..., 0].int() | runs[..., 1].int() << 8
        codes = [sum((words >> place & 1) << bit for bit, place in enumerate(places)) for places in E2M1_BITS]
        runs = torch.stack(codes, dim=-1).to(torch.uint8)  # type: ignore[arg-type]  # sum() may be 0 by its type alone
    elif codes_a_word(kind) == 4:
        runs = torch.stack((runs & 15, runs >> 4), dim=-1).flatten(3)
    return runs.transpose(2, 3).reshape(codes_RJ.shape[0], -1)[:, :columns]


def dequantise_stack(weight: StackedCodes, dtype: torch.dtype) -> Tensor:
    """The matrices [N, O, I], computed in float32 (or wider) and rounded once."""
    codes_RI = unpack_steps(weight.kind, weight.codes_RJ, weight.columns)
    scales_RG = power_of_two(weight.scales_RG) if weight.has_powers else weight.scales_RG
    wide = torch.promote_types(torch.promote_types(dtype, torch.float32), scales_RG.dtype)
    group = weight.group or weight.columns

    def spread(of_RG: Tensor) -> Tensor:
        return of_RG.to(wide).repeat_interleave(group, dim=1)[:, : weight.columns]

    numbers_RI = values(weight.kind, codes_RI).to(wide)
    if weight.zeros_RG is not None:
        numbers_RI -= spread(weight.zeros_RG)
    return (numbers_RI * spread(scales_RG)).to(dtype).view(weight.matrices, -1, weight.columns)


def chosen_of(weight: StackedCodes, ids: Tensor) -> StackedCodes:
    """The matrices of these numbers, as a stack of ids.numel()."""

    def of(plane: Tensor) -> Tensor:
        return plane.view(weight.matrices, weight.rows, -1)[ids.flatten()].flatten(0, 1)

    zeros = None if weight.zeros_RG is None else of(weight.zeros_RG)
    return weight._replace(
        matrices=ids.numel(), codes_RJ=of(weight.codes_RJ), scales_RG=of(weight.scales_RG), zeros_RG=zeros
    )  # fmt: skip


def power_of_two(exponents: Tensor) -> Tensor:
    """2^(byte - 127) in float32; NaN for 255, which stands for it."""
    scales = torch.exp2(exponents.double() - 127).float()
    return torch.where(exponents == 255, torch.nan, scales)
