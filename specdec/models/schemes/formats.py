"""The layouts of weights of 8 or 4 bits in published checkpoints: which tensors a matrix has, and what these hold.

Each format reads the tensors under a matrix's name and brings them to QuantisedRows (rows.py).  This file has formats whose
quantised values are floats, and the rounding of dense weights; integers.py has the others.  Both know tensors and names, and
neither config files nor models.

Shapes: N rows, K columns, G groups of a row's columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from specdec.models.schemes.rows import QuantisedRows
from specdec.models.schemes.source import (
    FLOAT32,
    Outline,
    TensorSource,
    check_groups,
    ignore,
    one_of,
    take_bytes,
    take_powers,
    take_scale,
)
from specdec.ops.products.formats.experts import power_of_two
from specdec.ops.products.formats.quantised import Kind, quantise, unpack

MIN_GROUP = 32  # columns of a scale, below which no kernel reads them
MX_BLOCK = 32  # columns that share a scale in mxfp4


@dataclass(frozen=True)
class Fp8:
    """Floats of 8 bits (e4m3), with scales that multiply.

    scale: the ending of the scale's name.  per: what has a scale of its own.  block: rows and columns of a block.
    or_scale: another ending that the name may have; empty: none.
    """

    scale: str
    per: Literal["tensor", "channel", "block"]
    block: tuple[int, int] = (128, 128)
    or_scale: str = ""
    packs: ClassVar[bool] = False
    in_act_order: ClassVar[bool] = False
    may_end: ClassVar[tuple[str, ...]] = ("input_scale", "activation_scale")  # of activations, which are not rounded here

    def scale_of(self, source: TensorSource, name: str) -> str:
        """The name of the scale of that matrix."""
        first, second = f"{name}.{self.scale}", f"{name}.{self.or_scale}"
        return second if first not in source and self.or_scale and second in source else first

    def endings(self, source: TensorSource, name: str) -> tuple[str, ...]:
        return "weight", self.scale_of(source, name).removeprefix(f"{name}.")

    def has(self, source: TensorSource, name: str) -> bool:
        return self.scale_of(source, name) in source

    def read(self, source: TensorSource, name: str, shape: tuple[int, int], device: torch.device) -> QuantisedRows | None:
        N, K = shape
        qvalues = source.take_quantised(f"{name}.weight", shape, "F8_E4M3").to(device)
        source.landed(f"{name}.weight", qvalues)
        ignore(source, name, self.may_end)
        scale_name, (rows, group_size) = self.scale_of(source, name), self.block if self.per == "block" else (1, 0)
        shapes: dict[str, list[tuple[int, ...]]] = {
            "block": [(-(-N // rows), -(-K // (group_size or 1)))], "channel": [(N, 1), (N,)], "tensor": [(), (1,), (1, 1)]
        }  # fmt: skip
        form = one_of(source, scale_name, *shapes[self.per])
        if scale_name in source and source.dtype(scale_name) == "F8_E8M0":  # DeepSeek's scale_fmt "ue8m0"
            found = power_of_two(take_powers(source, scale_name, form, "F8_E8M0").to(device))
            source.landed(scale_name, found)
        else:
            found = take_scale(source, scale_name, form, device)
        if not source.has_data:
            return None
        if self.per == "block":
            scales_NG = found.repeat_interleave(min(rows, N), dim=0)[:N]
        else:
            scales_NG = found.view(N, 1) if self.per == "channel" else found.view(1, 1).expand(N, 1)
        return QuantisedRows("e4m3", qvalues.view(torch.uint8), scales_NG, None, group_size)

    def outline(self, source: TensorSource, name: str) -> Outline:
        (rows, columns), scale = source.shape(f"{name}.weight"), self.scale_of(source, name)
        scale_bytes = FLOAT32 if source.dtype(scale) == "F8_E8M0" else source.itemsize(scale)
        return Outline("e4m3", rows, columns, self.group_size_of(columns), scale_bytes)

    def group_size_of(self, columns: int) -> int:
        return self.block[1] if self.per == "block" else 0

    def describe(self) -> str:
        scaled = {"tensor": "matrix", "channel": "row", "block": f"{self.block[0]} x {self.block[1]} block"}[self.per]
        return f"fp8, a scale for each {scaled}"


@dataclass(frozen=True)
class Fp4:
    """Floats of 4 bits (e2m1), two in a byte, the first in the low nibble.

    weight: the ending of the quantised values' name.  group_size: 32 with scales that are powers of two (mxfp4), 16 with e4m3
    scales (nvfp4).
    whole: the ending of the name of nvfp4's scale for the whole matrix.  divides: whether that scale divides.
    """

    weight: str
    group_size: int
    whole: str = ""
    divides: bool = False
    packs: ClassVar[bool] = True
    in_act_order: ClassVar[bool] = False

    def endings(self, source: TensorSource, name: str) -> tuple[str, ...]:
        return self.weight, "weight_scale", *((self.whole,) if self.whole else ())

    @property
    def may_end(self) -> tuple[str, ...]:
        """Scales of activations, which are not rounded here."""
        return ("input_scale", "input_global_scale") if self.whole else ()

    def has(self, source: TensorSource, name: str) -> bool:
        return f"{name}.weight_scale" in source and (not self.whole or f"{name}.{self.whole}" in source)

    def read(self, source: TensorSource, name: str, shape: tuple[int, int], device: torch.device) -> QuantisedRows | None:
        N, K = shape
        check_groups(source, f"{name}.{self.weight}", K, self.group_size)
        for ending in ("pre_quant_scale",):
            if f"{name}.{ending}" in source:
                raise source.refuse(f"{name}.{ending}", "scales activations, which can't be computed")
        packed = take_bytes(source, f"{name}.{self.weight}", (N, K // 2)).to(device)
        scale_name, whole_name, grid = f"{name}.weight_scale", f"{name}.{self.whole}", (N, K // self.group_size)
        ignore(source, name, self.may_end)
        if self.whole:
            scales = source.take_quantised(scale_name, grid, "F8_E4M3").to(device)
            of_all = take_scale(source, whole_name, one_of(source, whole_name, (), (1,)), device)
        else:
            scales = take_powers(source, scale_name, grid, "U8", "F8_E8M0").to(device)
            of_all = torch.empty(0, dtype=torch.float32, device="cpu")
        if not source.has_data:
            return None
        of_all = of_all.float()
        if not bool(of_all.isfinite().all()):
            raise source.refuse(whole_name, f"must be a number that float32 can hold, got {float(of_all):g}")
        if self.divides and not bool(of_all > 0):
            raise source.refuse(whole_name, f"divides all scales of the matrix, so it must be above 0, got {float(of_all):g}")
        qvalues_NK = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
        if not self.whole:
            scales_NG = power_of_two(scales)
        else:
            scales_NG = scales.float() / of_all if self.divides else scales.float() * of_all
            if bool(scales.float().isfinite().all()) and not bool(scales_NG.isfinite().all()):
                raise source.refuse(whole_name, f"makes scales that float32 can't hold, got {float(of_all):g}")
        source.landed(scale_name, scales_NG)
        return QuantisedRows("e2m1", qvalues_NK, scales_NG, None, self.group_size)

    def outline(self, source: TensorSource, name: str) -> Outline:
        rows, half = source.shape(f"{name}.{self.weight}")
        return Outline("e2m1", rows, 2 * half, self.group_size, FLOAT32)

    def group_size_of(self, columns: int) -> int:
        return self.group_size

    def describe(self) -> str:
        return "nvfp4, weights alone" if self.whole else "mxfp4, weights alone"


@dataclass(frozen=True)
class ExpertBlocks:
    """gpt-oss's own layout: a projection of all experts of a layer in two tensors, mxfp4 in blocks of 32 columns.

    The rows of an expert's gate and up projections alternate; they are read as they lie.  experts: how many there are.
    """

    experts: int
    packs: ClassVar[bool] = True
    in_act_order: ClassVar[bool] = False
    may_end: ClassVar[tuple[str, ...]] = ()

    def endings(self, source: TensorSource, name: str) -> tuple[str, ...]:
        return ()  # its names have no dot before their endings

    def has(self, source: TensorSource, name: str) -> bool:
        return f"{name}_blocks" in source

    def read(self, source: TensorSource, name: str, shape: tuple[int, int], device: torch.device) -> QuantisedRows | None:
        """The rows of all experts, one expert's after another's."""
        rows, columns = shape
        parts = list(self.matrices(source, name, (rows // self.experts, columns), device))
        if not parts:
            return None
        scales_NG = torch.cat([part.scales_PG for part in parts])
        return parts[0]._replace(qvalues_PK=torch.cat([part.qvalues_PK for part in parts]), scales_PG=scales_NG)

    def matrices(
        self, source: TensorSource, name: str, shape: tuple[int, int], device: torch.device, numbers: range | None = None
    ) -> Iterator[QuantisedRows]:  # fmt: skip
        """The matrices, of that shape, of each expert or of those of these numbers; none if the source has no data."""
        (N, K), E = shape, self.experts
        own = slice(None) if numbers is None else slice(numbers.start, numbers.stop)
        blocks = take_bytes(source, f"{name}_blocks", (E, N, K // MX_BLOCK, MX_BLOCK // 2))
        exponents = take_bytes(source, f"{name}_scales", (E, N, K // MX_BLOCK))
        for packed, powers in zip(blocks[own], exponents[own]) if source.has_data else ():
            packed, scales_NG = packed.to(device).flatten(1), power_of_two(powers.to(device))
            source.landed(f"{name}_scales", scales_NG)
            yield QuantisedRows("e2m1", torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1), scales_NG, None, MX_BLOCK)

    def outline(self, source: TensorSource, name: str) -> Outline:
        experts, each, blocks, half = source.shape(f"{name}_blocks")
        return Outline("e2m1", experts * each, 2 * blocks * half, MX_BLOCK, scale_bytes=1)

    def group_size_of(self, columns: int) -> int:
        return MX_BLOCK

    def describe(self) -> str:
        return "experts in mxfp4, weights alone"


@dataclass(frozen=True)
class RoundToNearest:
    """A dense matrix, quantised as it is loaded.

    group_size: columns of a scale where these divide a matrix's; 0: all of a row.  See `group_size_of`.
    """

    kind: Kind
    group_size: int
    packs: ClassVar[bool] = False
    in_act_order: ClassVar[bool] = False
    may_end: ClassVar[tuple[str, ...]] = ()

    def endings(self, source: TensorSource, name: str) -> tuple[str, ...]:
        return ("weight",)

    def has(self, source: TensorSource, name: str) -> bool:
        return True

    def read(self, source: TensorSource, name: str, shape: tuple[int, int], device: torch.device) -> QuantisedRows | None:
        weight_NK = source.take(f"{name}.weight", shape).to(device)
        source.landed(f"{name}.weight", weight_NK)
        return None if not source.has_data else rounded(weight_NK, self.kind, self.group_size_of(shape[1]))

    def outline(self, source: TensorSource, name: str) -> Outline:
        rows, columns = source.shape(f"{name}.weight")
        return Outline(self.kind, rows, columns, self.group_size_of(columns), FLOAT32)

    def group_size_of(self, columns: int) -> int:
        """Columns of a scale in a matrix of so many: `group_size`, or else 32, which divide what ranks share more often than 64
        do.

        0: all of a row.
        """
        if self.group_size and columns % self.group_size == 0:
            return self.group_size
        return MIN_GROUP if self.group_size and columns % MIN_GROUP == 0 and MIN_GROUP < columns else 0

    def describe(self) -> str:
        if not self.group_size:
            return f"{'fp8' if self.kind == 'e4m3' else self.kind}, a scale for each row"
        fewer = f"or for {MIN_GROUP} or all of a row where {self.group_size} does not divide them"
        return f"{self.kind}, a scale for each {self.group_size} columns, {fewer}"


def rounded(weight_NK: Tensor, kind: Kind, group_size: int) -> QuantisedRows:
    """The matrix rounded to nearest.  group_size: columns of a scale, which divide the matrix's; 0: all of a row."""
    assert not group_size or weight_NK.shape[1] % group_size == 0, (weight_NK.shape, group_size)
    found = quantise(weight_NK, kind, group_size)
    return QuantisedRows(kind, unpack(kind, found.qweight_NJ, found.columns), found.scales_NG, None, group_size)
