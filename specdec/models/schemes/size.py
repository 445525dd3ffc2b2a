"""How many bytes a matrix of a quantised checkpoint takes in memory, by the headers of its files alone.  No tensor is read."""

from __future__ import annotations

from typing import NamedTuple

from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.schemes.formats import MX_BLOCK, ExpertBlocks, Fp4, Fp8, RoundToNearest
from specdec.models.schemes.integers import Awq, Gptq, PackedInts
from specdec.models.schemes.source import Format
from specdec.ops.experts.codes import POWERS, scales_form, step_bytes, steps_of
from specdec.ops.quantised.codes import Kind, row_bytes

FLOAT32 = 4
EXPERTS = ".experts."  # in the names of experts' matrices


class MatrixSize(NamedTuple):
    """bytes: of its codes, scales and zeros, as schemes/planes.py keeps them, or schemes/stacks.py those of experts.

    numbers: how many the codes stand for.  is_computed: whether these are computed for products of many rows.
    """

    bytes: int
    numbers: int
    is_computed: bool


def matrix_size(format: Format, checkpoint: Checkpoint, name: str) -> MatrixSize:
    if isinstance(format, Fp8):
        (rows, columns), kind, scales = checkpoint.shape(f"{name}.weight"), "e4m3", format.scale_of(checkpoint, name)
        group, zeros = format.block[1] if format.per == "block" else 0, 0
        scale_bytes = FLOAT32 if checkpoint.dtype(scales) == "F8_E8M0" else checkpoint.itemsize(scales)
    elif isinstance(format, ExpertBlocks):
        (experts, each, blocks, half), kind, group = checkpoint.shape(f"{name}_blocks"), "e2m1", MX_BLOCK
        rows, columns, zeros, scale_bytes = experts * each, 2 * blocks * half, 0, 1
    elif isinstance(format, RoundToNearest):
        (rows, columns), kind, zeros, scale_bytes = checkpoint.shape(f"{name}.weight"), format.kind, 0, FLOAT32
        group = format.group_of(columns)
    elif isinstance(format, Fp4):
        (rows, half), kind, group, zeros, scale_bytes = (
            checkpoint.shape(f"{name}.{format.weight}"),
            "e2m1",
            format.group,
            0,
            FLOAT32,
        )
        columns = 2 * half
    elif isinstance(format, PackedInts):
        (rows, words), kind = checkpoint.shape(f"{name}.weight_packed"), f"int{format.bits}"
        columns, group, zeros = words * 32 // format.bits, format.group, int(not format.symmetric)
        scale_bytes = checkpoint.itemsize(f"{name}.weight_scale")
    else:
        assert isinstance(format, Awq | Gptq), format
        first, second = checkpoint.shape(f"{name}.qweight")
        bits, zeros = (4, 1) if isinstance(format, Awq) else (format.bits, int(not format.symmetric))
        rows, columns = (8 * second, first) if isinstance(format, Awq) else (second, first * 32 // bits)
        kind, group, scale_bytes = f"int{bits}", format.group, checkpoint.itemsize(f"{name}.scales")
    groups = -(-columns // (group or columns))
    known: dict[str, Kind] = {"e4m3": "e4m3", "e2m1": "e2m1", "int4": "int4", "int8": "int8"}
    if EXPERTS not in name:
        return MatrixSize(rows * (row_bytes(known[kind], columns) + groups * (scale_bytes + zeros)), rows * columns, True)
    form, steps = scales_form(known[kind], group), steps_of(columns)
    row = steps * step_bytes(known[kind]) + (steps * POWERS if form == "powers" else groups * (scale_bytes + zeros))
    return MatrixSize(rows * row, rows * columns, not form)
