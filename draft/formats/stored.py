"""How matrices of heads and of MTP layers lie in a checkpoint: as numbers, or in 8 or 4 bits as several tensors.

By names and headers alone, for strict reading before memory is taken, and for `inspect`.  Knows no layout and no kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.checkpoints.stored import SAFE_DTYPES
from specdec.models.schemes.source import WeightFormat

Shapes = dict[str, tuple[int, ...]]
Formats = Mapping[str, WeightFormat]  # by matrices' names, those that are in 8 or 4 bits


def formats_of(checkpoint: Checkpoint, matrices: Iterable[str]) -> Formats:
    """Of these matrices those in 8 or 4 bits.  Names are without an ending."""
    found = {name: checkpoint.format_of(name) for name in matrices}
    return {name: format for name, format in found.items() if format is not None}


def stored_tensors(checkpoint: Checkpoint, wanted: Shapes, formats: Formats) -> Shapes:
    """All tensors that are needed, as the checkpoint stores them.  wanted: the same, unquantised.

    The shape of a tensor of quantised values or scales is its own, by the header; nobody has compared it with the matrix's.
    """
    stored: Shapes = {}
    for name, shape in wanted.items():
        matrix = name.removesuffix(".weight")
        if (format := formats.get(matrix)) is None:
            stored[name] = shape
            continue
        for ending in format.endings(checkpoint, matrix):
            tensor = f"{matrix}.{ending}"
            is_own = tensor not in checkpoint or (tensor == name and not format.packs)
            stored[tensor] = shape if is_own else checkpoint.shape(tensor)
    return stored


def beside_quantised(formats: Formats) -> set[str]:
    """Tensors that may lie beside quantised values."""
    return {f"{name}.{ending}" for name, format in formats.items() for ending in format.may_end}


def expect_shapes(checkpoint: Checkpoint, wanted: Shapes, formats: Formats, keys: Callable[[str], str]) -> None:
    """ValueError for a tensor of another shape, or that holds no floating-point numbers, unless values are packed in it.

    keys: from a tensor's name to the keys of config.json that its shape follows from.
    """
    for name, shape in wanted.items():
        format = formats.get(name.removesuffix(".weight"))
        if format is None or not format.packs:
            checkpoint.expect(name, shape, keys(name))
            checkpoint.expect_kind(name, "floating-point numbers")
        if format is None and (dtype := checkpoint.dtype(name)).startswith("F8"):
            missing = "quantization_config in config.json, by which such numbers are scaled"
            wanted_there = missing if checkpoint.quantization is None else "that of what config.json leaves unquantised"
            raise checkpoint.refuse(name, f"must hold numbers of 16 or more bits, got {dtype}; expected {wanted_there}")


def how_stored(checkpoint: Checkpoint, matrices: Iterable[str], formats: Formats) -> list[str]:
    """The ways in which these matrices lie in the checkpoint, in words."""

    def way(name: str) -> str:
        if (format := formats.get(name)) is not None:
            return format.describe()
        return str(SAFE_DTYPES[checkpoint.dtype(f"{name}.weight")]).removeprefix("torch.")

    return list(dict.fromkeys(map(way, matrices)))
