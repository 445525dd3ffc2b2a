"""How many bytes a matrix of a quantised checkpoint takes in memory, by the headers of its files alone.  No tensor is read."""

from __future__ import annotations

from typing import NamedTuple

from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.schemes.source import Format
from specdec.ops.experts.codes import POWERS, scales_form, step_bytes, steps_of
from specdec.ops.quantised.codes import row_bytes

EXPERTS = ".experts."  # in the names of experts' matrices


class MatrixSize(NamedTuple):
    """bytes: of its codes, scales and zeros, as schemes/planes.py keeps them, or schemes/stacks.py those of experts.

    numbers: how many the codes stand for.  is_computed: whether these are computed for products of many rows.
    """

    bytes: int
    numbers: int
    is_computed: bool


def matrix_size(format: Format, checkpoint: Checkpoint, name: str) -> MatrixSize:
    kind, rows, columns, group, scale_bytes, has_zeros = format.outline(checkpoint, name)
    groups, numbers = -(-columns // (group or columns)), rows * columns
    scaled = groups * (scale_bytes + int(has_zeros))
    if EXPERTS not in name:
        return MatrixSize(rows * (row_bytes(kind, columns) + scaled), numbers, True)
    form, steps = scales_form(kind, group), steps_of(columns)
    return MatrixSize(rows * (steps * step_bytes(kind) + (steps * POWERS if form == "powers" else scaled)), numbers, not form)
