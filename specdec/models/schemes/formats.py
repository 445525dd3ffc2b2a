"""The layouts of weights of 8 or 4 bits in published checkpoints: which tensors a matrix has, and which codes they hold.

Each format reads the tensors under a matrix's name and brings them to rows of codes (rows.py).  This file knows tensors and
names, and neither config files nor models.

Shapes: O rows, I columns, G groups of a row's columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from specdec.models.schemes.rows import CodedRows
from specdec.ops.experts.codes import power_of_two
from specdec.ops.quantised.codes import Kind, quantise, unpack

ADDED = {4: 8, 8: 128}  # to signed integers of so many bits, to store them unsigned
MX_BLOCK = 32  # columns that share a scale in mxfp4
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each nibble of a word holds, the lowest first


class Source(Protocol):
    """The checkpoint, as formats read it.  Every tensor taken is of that shape, or ValueError is raised, and counts as read.

    has_numbers: whether tensors that are taken have numbers, or only show that names, shapes and dtypes are right.
    """

    has_numbers: bool

    def take(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor: ...
    def take_codes(self, name: str, shape: tuple[int, ...], dtype: str) -> Tensor: ...
    def take_integers(self, name: str, shape: tuple[int, ...]) -> Tensor: ...
    def landed(self, name: str, copy: Tensor) -> None: ...
    def ignore(self, name: str) -> None: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def refuse(self, name: str, problem: str) -> ValueError: ...
    def __contains__(self, name: str) -> bool: ...


class Format(Protocol):
    """How a matrix lies in a checkpoint.  packs: whether no tensor of it has the matrix's own shape.

    endings: of the names of its tensors.  may_end: of tensors that may be there, too.
    """

    packs: ClassVar[bool]

    @property
    def endings(self) -> tuple[str, ...]: ...
    @property
    def may_end(self) -> tuple[str, ...]: ...

    def read(self, source: Source, name: str, shape: tuple[int, int], device: torch.device) -> CodedRows | None:
        """The matrix of that name and shape, on the device; None if the source has no numbers.

        ValueError if a tensor is missing or of another shape.
        """
        ...

    def has(self, source: Source, name: str) -> bool:
        """Whether the tensors of that name are in this format, as far as names say."""
        ...


@dataclass(frozen=True)
class Fp8:
    """Floats of 8 bits (e4m3), with scales that multiply.

    scale: the ending of the scale's name.  per: what has a scale of its own.  block: rows and columns of a block.
    """

    scale: str
    per: Literal["tensor", "channel", "block"]
    block: tuple[int, int] = (128, 128)
    packs: ClassVar[bool] = False
    may_end: ClassVar[tuple[str, ...]] = ("input_scale",)  # of activations, which are not rounded here

    @property
    def endings(self) -> tuple[str, ...]:
        return "weight", self.scale

    def has(self, source: Source, name: str) -> bool:
        return f"{name}.{self.scale}" in source

    def read(self, source: Source, name: str, shape: tuple[int, int], device: torch.device) -> CodedRows | None:
        O, I = shape
        numbers = source.take_codes(f"{name}.weight", shape, "F8_E4M3").to(device)
        source.landed(f"{name}.weight", numbers)
        _ignore(source, name, self.may_end)
        scale_name, (rows, group) = f"{name}.{self.scale}", self.block if self.per == "block" else (1, 0)
        shapes: dict[str, list[tuple[int, ...]]] = {
            "block": [(-(-O // rows), -(-I // (group or 1)))], "channel": [(O, 1), (O,)], "tensor": [(), (1,), (1, 1)]
        }  # fmt: skip
        found = _scale(source, scale_name, _one_of(source, scale_name, *shapes[self.per]), device)
        if not source.has_numbers:
            return None
        if self.per == "block":
            scales_OG = found.repeat_interleave(rows, dim=0)[:O]
        else:
            scales_OG = found.view(O, 1) if self.per == "channel" else found.view(1, 1).expand(O, 1)
        return CodedRows("e4m3", numbers.view(torch.uint8), scales_OG, None, group)


@dataclass(frozen=True)
class PackedInts:
    """compressed-tensors' "pack-quantized" integers: W4A16 and W8A16.  group: columns of a scale; 0: all of a row."""

    bits: int
    group: int
    symmetric: bool
    packs: ClassVar[bool] = True
    may_end: ClassVar[tuple[str, ...]] = ("weight_g_idx",)  # which `read` refuses by name

    @property
    def endings(self) -> tuple[str, ...]:
        return "weight_packed", "weight_scale", "weight_shape", *(() if self.symmetric else ("weight_zero_point",))

    def has(self, source: Source, name: str) -> bool:
        return f"{name}.weight_packed" in source

    def read(self, source: Source, name: str, shape: tuple[int, int], device: torch.device) -> CodedRows | None:
        (O, I), a_word = shape, 32 // self.bits
        if f"{name}.weight_g_idx" in source:
            raise source.refuse(
                f"{name}.weight_g_idx", "gives columns to groups out of order (act order), which can't be computed"
            )
        _check_groups(source, f"{name}.weight_packed", I, self.group)
        words = source.take_integers(f"{name}.weight_packed", (O, -(-I // a_word))).to(device)
        shape_2 = source.take_integers(f"{name}.weight_shape", (2,))
        G = I // (self.group or I)
        scales_OG = _scale(source, f"{name}.weight_scale", (O, G), device)
        packed = None
        if not self.symmetric:
            packed = source.take_integers(f"{name}.weight_zero_point", (-(-O // a_word), G)).to(device)
        if not source.has_numbers:
            return None
        if (said := shape_2.tolist()) != [O, I]:
            raise source.refuse(f"{name}.weight_shape", f"must be {[O, I]}, got {said}")
        zeros_OG = None if packed is None else _relative(_fields(packed.T, self.bits)[:, :O].T, self.bits)
        return CodedRows(_integers(self.bits), _fields(words, self.bits)[:, :I], scales_OG, zeros_OG, self.group)


@dataclass(frozen=True)
class Awq:
    """AutoAWQ's "gemm" layout: 4 bits, eight neighbouring rows of the matrix in a word, with zeros."""

    group: int
    packs: ClassVar[bool] = True
    endings: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")
    may_end: ClassVar[tuple[str, ...]] = ()

    def has(self, source: Source, name: str) -> bool:
        return f"{name}.qweight" in source

    def read(self, source: Source, name: str, shape: tuple[int, int], device: torch.device) -> CodedRows | None:
        O, I = shape
        group = self.group or I
        _check_groups(source, f"{name}.qweight", I, group)
        if O % 8:
            raise source.refuse(f"{name}.qweight", f"packs eight rows in a word, but the matrix has {O}")
        words_IO8 = source.take_integers(f"{name}.qweight", (I, O // 8)).to(device)
        zeros_GO8 = source.take_integers(f"{name}.qzeros", (I // group, O // 8)).to(device)
        scales_GO = _scale(source, f"{name}.scales", (I // group, O), device)
        if not source.has_numbers:
            return None
        codes_IO, zeros_GO = (
            _fields(words, 4).unflatten(1, (-1, 8))[..., _inverse()].flatten(1) for words in (words_IO8, zeros_GO8)
        )
        return CodedRows("int4", codes_IO.T.contiguous(), scales_GO.T.contiguous(), _relative(zeros_GO.T, 4), self.group)


@dataclass(frozen=True)
class Gptq:
    """GPTQ's layout: neighbouring columns in a word.

    added: 1 where the file holds zeros minus 1 (the older format).  symmetric: then the zeros are not read, since some files
    that say so hold those of the other format.
    """

    bits: int
    group: int
    symmetric: bool
    added: int
    packs: ClassVar[bool] = True
    endings: ClassVar[tuple[str, ...]] = ("qweight", "qzeros", "scales")
    may_end: ClassVar[tuple[str, ...]] = ("g_idx",)

    def has(self, source: Source, name: str) -> bool:
        return f"{name}.qweight" in source

    def read(self, source: Source, name: str, shape: tuple[int, int], device: torch.device) -> CodedRows | None:
        (O, I), a_word, group = shape, 32 // self.bits, self.group or shape[1]
        _check_groups(source, f"{name}.qweight", I, group)
        if O % a_word or I % a_word:
            raise source.refuse(f"{name}.qweight", f"packs {a_word} numbers in a word, but the matrix is {O} x {I}")
        words = source.take_integers(f"{name}.qweight", (I // a_word, O)).to(device)
        zeros = source.take_integers(f"{name}.qzeros", (I // group, O // a_word)).to(device)
        scales_GO = _scale(source, f"{name}.scales", (I // group, O), device)
        order_I = source.take_integers(f"{name}.g_idx", (I,)) if f"{name}.g_idx" in source else None
        if not source.has_numbers:
            return None
        if order_I is not None and not torch.equal(order_I, (torch.arange(I) // group).to(order_I.dtype)):
            raise source.refuse(
                f"{name}.g_idx", "gives columns to groups out of order (desc_act, act order), which can't be computed; "
                "nearest thing that works: a checkpoint made with desc_act false"
            )  # fmt: skip
        zeros_OG = None
        if not self.symmetric:
            zeros_OG = _relative(((_fields(zeros, self.bits).int() + self.added) % (1 << self.bits)).T, self.bits)
        codes_OI = _fields(words.T.contiguous(), self.bits)
        return CodedRows(_integers(self.bits), codes_OI, scales_GO.T.contiguous(), zeros_OG, self.group)


@dataclass(frozen=True)
class Fp4:
    """Floats of 4 bits (e2m1), two in a byte, the first in the low nibble.

    weight: the ending of the codes' name.  group: 32 with scales that are powers of two (mxfp4), 16 with e4m3 scales (nvfp4).
    whole: the ending of the name of nvfp4's scale for the whole matrix.  divides: whether that scale divides.
    """

    weight: str
    group: int
    whole: str = ""
    divides: bool = False
    packs: ClassVar[bool] = True

    @property
    def endings(self) -> tuple[str, ...]:
        return self.weight, "weight_scale", *((self.whole,) if self.whole else ())

    @property
    def may_end(self) -> tuple[str, ...]:
        """Scales of activations, which are not rounded here."""
        return ("input_scale", "input_global_scale") if self.whole else ()

    def has(self, source: Source, name: str) -> bool:
        return f"{name}.weight_scale" in source and (not self.whole or f"{name}.{self.whole}" in source)

    def read(self, source: Source, name: str, shape: tuple[int, int], device: torch.device) -> CodedRows | None:
        O, I = shape
        _check_groups(source, f"{name}.{self.weight}", I, self.group)
        for ending in ("pre_quant_scale",):
            if f"{name}.{ending}" in source:
                raise source.refuse(f"{name}.{ending}", "scales activations, which can't be computed")
        packed = source.take_integers(f"{name}.{self.weight}", (O, I // 2)).to(device)
        scale_name, whole_name, grid = f"{name}.weight_scale", f"{name}.{self.whole}", (O, I // self.group)
        _ignore(source, name, self.may_end)
        if self.whole:
            scales = source.take_codes(scale_name, grid, "F8_E4M3").to(device)
            of_all = _scale(source, whole_name, _one_of(source, whole_name, (), (1,)), device)
        else:
            scales, of_all = source.take_integers(scale_name, grid).to(device), torch.empty(0)
        if not source.has_numbers:
            return None
        codes_OI = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
        if not self.whole:
            scales_OG = power_of_two(scales)
        else:
            scales_OG = scales.float() / of_all.float() if self.divides else scales.float() * of_all.float()
        source.landed(scale_name, scales_OG)
        return CodedRows("e2m1", codes_OI, scales_OG, None, self.group)


@dataclass(frozen=True)
class ExpertBlocks:
    """gpt-oss's own layout: a projection of all experts of a layer in two tensors, mxfp4 in blocks of 32 columns.

    The rows of an expert's gate and up projections alternate; they are read as they lie.  experts: how many there are.
    """

    experts: int
    packs: ClassVar[bool] = True
    endings: ClassVar[tuple[str, ...]] = ()  # its names have no dot before their endings
    may_end: ClassVar[tuple[str, ...]] = ()

    def has(self, source: Source, name: str) -> bool:
        return f"{name}_blocks" in source

    def read(self, source: Source, name: str, shape: tuple[int, int], device: torch.device) -> CodedRows | None:
        """The rows of all experts, one expert's after another's."""
        rows, columns = shape
        parts = list(self.matrices(source, name, (rows // self.experts, columns), device))
        if not parts:
            return None
        scales_OG = torch.cat([part.scales_PG for part in parts])
        return parts[0]._replace(codes_PI=torch.cat([part.codes_PI for part in parts]), scales_PG=scales_OG)

    def matrices(
        self, source: Source, name: str, shape: tuple[int, int], device: torch.device
    ) -> Iterator[CodedRows]:  # fmt: skip
        """Each expert's matrix, of that shape; none if the source has no numbers."""
        (O, I), E = shape, self.experts
        blocks = _bytes(source, f"{name}_blocks", (E, O, I // MX_BLOCK, MX_BLOCK // 2))
        exponents = _bytes(source, f"{name}_scales", (E, O, I // MX_BLOCK))
        for packed, own in zip(blocks, exponents) if source.has_numbers else ():
            packed, scales_OG = packed.to(device).flatten(1), power_of_two(own.to(device))
            source.landed(f"{name}_scales", scales_OG)
            yield CodedRows("e2m1", torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1), scales_OG, None, MX_BLOCK)


@dataclass(frozen=True)
class RoundToNearest:
    """A matrix of ordinary numbers, rounded to codes as it is loaded.  group: columns of a scale; 0: all of a row."""

    kind: Kind
    group: int
    packs: ClassVar[bool] = False
    endings: ClassVar[tuple[str, ...]] = ("weight",)
    may_end: ClassVar[tuple[str, ...]] = ()

    def has(self, source: Source, name: str) -> bool:
        return True

    def read(self, source: Source, name: str, shape: tuple[int, int], device: torch.device) -> CodedRows | None:
        weight_OI = source.take(f"{name}.weight", shape).to(device)
        source.landed(f"{name}.weight", weight_OI)
        return None if not source.has_numbers else rounded(weight_OI, self.kind, self.group)


def rounded(weight_OI: Tensor, kind: Kind, group: int) -> CodedRows:
    """The matrix rounded to nearest.  Where its columns are no whole groups, each row has one scale."""
    group = group if group and weight_OI.shape[1] % group == 0 else 0
    found = quantise(weight_OI, kind, group)
    return CodedRows(kind, unpack(kind, found.codes_OJ, found.columns), found.scales_OG, None, group)


def _integers(bits: int) -> Kind:
    return "int4" if bits == 4 else "int8"


def _fields(words: Tensor, bits: int) -> Tensor:
    """Unsigned numbers of so many bits, from words [R, W] that hold them lowest bits first, in uint8 [R, W * 32 / bits]."""
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).to(torch.uint8).flatten(-2)


def _relative(zeros: Tensor, bits: int) -> Tensor:
    """Unsigned zeros relative to the code of 0, as int8."""
    return (zeros.int() - ADDED[bits]).to(torch.int8).contiguous()


def _inverse() -> list[int]:
    return [AWQ_ORDER.index(column) for column in range(8)]


def _ignore(source: Source, name: str, endings: tuple[str, ...]) -> None:
    for ending in endings:
        source.ignore(f"{name}.{ending}")


def _bytes(source: Source, name: str, shape: tuple[int, ...]) -> Tensor:
    found = source.take_integers(name, shape)
    if found.dtype != torch.uint8:
        raise source.refuse(name, f"must hold bytes (U8), got {found.dtype}")
    return found


def _scale(source: Source, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    scale = source.take(name, shape).to(device)
    source.landed(name, scale)
    return scale


def _one_of(source: Source, name: str, *shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The one of these shapes that the tensor has, or else the first, which `take` then asks for."""
    return next((shape for shape in shapes if name in source and source.shape(name) == shape), shapes[0])


def _check_groups(source: Source, name: str, columns: int, group: int) -> None:
    if group and columns % group:
        raise source.refuse(name, f"has {columns} columns, which are no whole groups of {group}")
