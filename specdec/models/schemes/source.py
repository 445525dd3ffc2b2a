"""What a format of quantised weights needs of a checkpoint, and what all formats have in common.  Knows no format."""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from specdec.models.schemes.rows import QuantisedRows
from specdec.ops.products.formats.quantised import Kind

FLOAT32 = 4  # bytes


class TensorSource(Protocol):
    """The checkpoint, as formats read it.  Every tensor taken is of that shape, or ValueError is raised, and counts as read.

    has_data: whether tensors that are taken have values, or lie on the meta device and show names, shapes and dtypes alone.
    """

    has_data: bool

    def take(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor: ...
    def take_quantised(self, name: str, shape: tuple[int, ...], *dtypes: str) -> Tensor: ...
    def landed(self, name: str, copy: Tensor) -> None: ...
    def ignore(self, name: str) -> None: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> str: ...
    def itemsize(self, name: str) -> int: ...
    def refuse(self, name: str, problem: str) -> ValueError: ...
    def __contains__(self, name: str) -> bool: ...


class Outline(NamedTuple):
    """What becomes of a matrix in memory, by the headers of its tensors.

    group_size: columns of a scale; 0: all of a row.  scale_bytes: of one scale.  has_zero_points: whether each scale has a zero
    point beside it.
    """

    kind: Kind
    rows: int
    columns: int
    group_size: int
    scale_bytes: int
    has_zero_points: bool = False


class WeightFormat(Protocol):
    """How a matrix lies in a checkpoint.

    packs: whether several values lie in a word or a byte, so that no tensor has the matrix's own shape.
    may_end: how the names of tensors end that may be there beside those that `endings` says.
    """

    packs: ClassVar[bool]

    @property
    def may_end(self) -> tuple[str, ...]: ...

    @property
    def in_act_order(self) -> bool:
        """Whether a group's columns may be no neighbours: tensors say which columns they are (see QuantisedRows)."""
        ...

    def endings(self, source: TensorSource, name: str) -> tuple[str, ...]:
        """How the names of the matrix's tensors end."""
        ...

    def read(self, source: TensorSource, name: str, shape: tuple[int, int], device: torch.device) -> QuantisedRows | None:
        """The matrix of that name and shape, on the device; None if the source has no data.

        ValueError if a tensor is missing or of another shape.
        """
        ...

    def has(self, source: TensorSource, name: str) -> bool:
        """Whether the tensors of that name are in this format, as far as names say."""
        ...

    def outline(self, source: TensorSource, name: str) -> Outline:
        """The outline of the matrix of that name, by the headers of its tensors alone, which are there."""
        ...

    def group_size_of(self, columns: int) -> int:
        """Columns of a scale in a matrix of so many; 0: all of a row."""
        ...

    def describe(self) -> str:
        """The format in a few words, as `specdec inspect` prints it."""
        ...


def ignore(source: TensorSource, name: str, endings: tuple[str, ...]) -> None:
    for ending in endings:
        source.ignore(f"{name}.{ending}")


def take_bytes(source: TensorSource, name: str, shape: tuple[int, ...]) -> Tensor:
    return source.take_quantised(name, shape, "U8")


def take_words(source: TensorSource, name: str, shape: tuple[int, ...]) -> Tensor:
    """Words of 32 bits, each of which holds several quantised values."""
    return source.take_quantised(name, shape, "I32")


def take_indices(source: TensorSource, name: str, shape: tuple[int, ...]) -> Tensor:
    """Whole numbers that are meant as they stand."""
    return source.take_quantised(name, shape, "I32", "I64").long()


def take_powers(source: TensorSource, name: str, shape: tuple[int, ...], *dtypes: str) -> Tensor:
    """The exponents of powers of two, as bytes.  dtypes: that may be the tensor's, of one byte each."""
    return source.take_quantised(name, shape, *dtypes).view(torch.uint8)


def take_scale(source: TensorSource, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    scale = source.take(name, shape).to(device)
    source.landed(name, scale)
    return scale


def one_of(source: TensorSource, name: str, *shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The one of these shapes that the tensor has, or else the first, which `take` then asks for."""
    return next((shape for shape in shapes if name in source and source.shape(name) == shape), shapes[0])


def check_groups(source: TensorSource, name: str, columns: int, group_size: int) -> None:
    if group_size and columns % group_size:
        raise source.refuse(name, f"has {columns} columns, which are no whole groups of {group_size}")
