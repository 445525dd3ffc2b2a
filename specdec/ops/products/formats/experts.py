"""Stacks of matrices in 8 or 4 bits, one for each expert of a layer: where their quantised values and scales lie in memory.

Dense values are those of ops/products/formats/quantised.py: (quantised value - zero point) * scale.  Only the places of
quantised values and scales differ, as the kernel in kernels/experts/mixture_triton.py reads them.

Shapes: E experts, N rows of each one's matrix, R = E * N rows, K columns, S steps of a row, J bytes of a row, G groups of a
row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.ops.products.formats.quantised import Kind, pack_factor_of, unscaled

STEP = 128  # columns that a program multiplies at once; rows are padded to a multiple of it
LANES = 32  # columns that lie in neighbouring words
POWERS = 4  # scales of a step where each 32 columns have a power of two

# Where the four bits of each of a word's e2m1 values lie, the lowest first.  The first value's bits lie where bfloat16 has
# them, so that one instruction finds it; the next two values take two, and the fourth, which has the bits that are left, takes
# more.
E2M1_BITS = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (10, 11, 13, 14))


class QuantisedStack(NamedTuple):
    """Matrices [E, N, K].

    experts: E.
    qweight_RJ: uint8, the quantised values as `pack_steps` orders them.
    scales_RG: floats; [R, 1] where a row has one scale; uint8 exponents of powers of two (2^(e - 127)), [R, S * POWERS], of
        groups of 32 columns.
    zero_points_RG: int8, the signed integer that stands for 0.
    columns: K.
    group_size: columns of a scale; 0: all.
    """

    kind: Kind
    experts: int
    qweight_RJ: Tensor
    scales_RG: Tensor
    zero_points_RG: Tensor | None
    columns: int
    group_size: int

    @property
    def rows(self) -> int:
        """N: rows of a matrix."""
        return self.qweight_RJ.shape[0] // self.experts

    @property
    def has_powers(self) -> bool:
        return self.scales_RG.dtype == torch.uint8

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The dequantised matrices [E, N, K], in that dtype."""
        return dequantise_stack(self, dtype)

    def dense_of(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """The dequantised matrices of these experts [..., N, K]."""
        return dequantise_stack(stack_of(self, ids), dtype).unflatten(0, ids.shape)


def scales_form(kind: Kind, group_size: int) -> str:
    """Where the kernel finds scales of groups of so many columns; empty: it can't read them.

    "row": one a row.  "step": one for each step or several.  "parts": one for each 32 or 64 columns.  "powers": one for each
    32, powers of two, of which a step's are one word.
    """
    if group_size == 0:
        return "row"
    if kind == "e2m1":
        return "powers" if group_size == LANES else ""
    if group_size % STEP == 0:
        return "step"
    return "parts" if kind == "int4" and group_size in (LANES, 2 * LANES) else ""


def has_units(weight: QuantisedStack) -> bool:
    """Whether the kernels in kernels/quantised/few_hopper.py take weights of this form, 32 columns and 16 rows at a time."""
    form = scales_form(weight.kind, weight.group_size)
    has_scales = form == "powers" or (form in ("row", "step") and weight.kind in ("e4m3", "int4"))
    return has_scales and weight.zero_points_RG is None and weight.columns % LANES == 0 and weight.rows % 16 == 0


def steps_of(columns: int) -> int:
    """S."""
    return -(-columns // STEP)


def step_bytes(kind: Kind) -> int:
    """Bytes of a row's quantised values for a step."""
    return 2 * STEP // pack_factor_of(kind)


def pack_steps(kind: Kind, qvalues_RK: Tensor) -> Tensor:
    """[R, J]: quantised values, given one a byte, in words of 16 bits.

    A run of 64 columns (128 of 4 bits) becomes 32 words: the first 32 columns are the lowest bits of these words, the next 32
    the bits above them, and so on.  So the values of a word belong to different tiles of a product, and each tile has
    neighbouring columns, which have one scale.  The bits of e2m1 values are spread as E2M1_BITS says.
    """
    pack_factor, rows = pack_factor_of(kind), qvalues_RK.shape[0]
    if pad := -qvalues_RK.shape[1] % STEP:
        qvalues_RK = torch.nn.functional.pad(qvalues_RK, (0, pad))
    runs = qvalues_RK.view(rows, -1, pack_factor, LANES).transpose(2, 3)  # [R, run, word, value of the word]
    if kind == "e2m1":
        words = torch.zeros(runs.shape[:-1], dtype=torch.int32, device=runs.device)
        for value, places in zip(runs.unbind(-1), E2M1_BITS):
            for bit, place in enumerate(places):
                words |= (value.int() >> bit & 1) << place
        return torch.stack((words & 255, words >> 8), dim=-1).to(torch.uint8).reshape(rows, -1)
    return (runs if pack_factor == 2 else runs[..., ::2] | runs[..., 1::2] << 4).reshape(rows, -1)


def unpack_steps(kind: Kind, qweight_RJ: Tensor, columns: int) -> Tensor:
    """[R, K]: quantised values one a byte, from `pack_steps`'s words."""
    runs = qweight_RJ.view(qweight_RJ.shape[0], -1, LANES, 2)
    if kind == "e2m1":
        words = runs[..., 0].int() | runs[..., 1].int() << 8
        values = [sum((words >> place & 1) << bit for bit, place in enumerate(places)) for places in E2M1_BITS]
        runs = torch.stack(values, dim=-1).to(torch.uint8)  # type: ignore[arg-type]  # sum() may be 0 by its type alone
    elif pack_factor_of(kind) == 4:
        runs = torch.stack((runs & 15, runs >> 4), dim=-1).flatten(3)
    return runs.transpose(2, 3).reshape(qweight_RJ.shape[0], -1)[:, :columns]


def dequantise_stack(weight: QuantisedStack, dtype: torch.dtype) -> Tensor:
    """The dense matrices [E, N, K], computed in float32 (or a wider type) and rounded once."""
    qvalues_RK = unpack_steps(weight.kind, weight.qweight_RJ, weight.columns)
    scales_RG = power_of_two(weight.scales_RG) if weight.has_powers else weight.scales_RG
    precise = torch.promote_types(torch.promote_types(dtype, torch.float32), scales_RG.dtype)
    group_size = weight.group_size or weight.columns

    def spread(of_RG: Tensor) -> Tensor:
        return of_RG.to(precise).repeat_interleave(group_size, dim=1)[:, : weight.columns]

    dense_RK = unscaled(weight.kind, qvalues_RK).to(precise)
    if weight.zero_points_RG is not None:
        dense_RK -= spread(weight.zero_points_RG)
    return (dense_RK * spread(scales_RG)).to(dtype).view(weight.experts, -1, weight.columns)


def stack_of(weight: QuantisedStack, ids: Tensor) -> QuantisedStack:
    """The matrices of these experts, as a stack of ids.numel()."""

    def of(parameter: Tensor) -> Tensor:
        return parameter.view(weight.experts, weight.rows, -1)[ids.flatten()].flatten(0, 1)

    zero_points = None if weight.zero_points_RG is None else of(weight.zero_points_RG)
    return weight._replace(
        experts=ids.numel(), qweight_RJ=of(weight.qweight_RJ), scales_RG=of(weight.scales_RG), zero_points_RG=zero_points
    )  # fmt: skip


def power_of_two(exponents: Tensor) -> Tensor:
    """2^(byte - 127) in float32; NaN for 255, which stands for it."""
    scales = torch.exp2(exponents.double() - 127).float()
    return torch.where(exponents == 255, torch.nan, scales)
