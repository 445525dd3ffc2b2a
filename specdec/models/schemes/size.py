"""Which matrices of a checkpoint are in 8 or 4 bits, and how many bytes each takes, by headers alone.  No tensor is read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.schemes.source import WeightFormat
from specdec.ops.products.formats.experts import POWERS, scales_form, step_bytes, steps_of
from specdec.ops.products.formats.quantised import row_bytes

EXPERTS = ".experts."  # in the names of experts' matrices
# Names of tensors of matrices that may be stored in 8 or 4 bits.  What expands latents is computed into ordinary numbers.
MATRICES = re.compile(r"((?<!kv_b)(?<!eh)(?<!input)_proj(_with_mqa)?|\.wq_b|\.wk|\bfc|lm_head)\.\w+$")


class MatrixSize(NamedTuple):
    """bytes: of its codes, scales and zeros, as schemes/planes.py keeps them, or schemes/stacks.py those of experts.

    numbers: how many the codes stand for.  is_computed: whether these are computed for products of many rows.
    """

    bytes: int
    numbers: int
    is_computed: bool


def matrix_size(format: WeightFormat, checkpoint: Checkpoint, name: str) -> MatrixSize:
    kind, rows, columns, group, scale_bytes, has_zeros = format.outline(checkpoint, name)
    groups, numbers = -(-columns // (group or columns)), rows * columns
    scaled = groups * (scale_bytes + int(has_zeros))
    if EXPERTS not in name:
        return MatrixSize(rows * (row_bytes(kind, columns) + scaled), numbers, True)
    form, steps = scales_form(kind, group), steps_of(columns)
    return MatrixSize(rows * (steps * step_bytes(kind) + (steps * POWERS if form == "powers" else scaled)), numbers, not form)


def group_of(checkpoint: Checkpoint, name: str, format: WeightFormat) -> int:
    """Columns of a scale in a matrix; 0: all of a row.  Asks for no scale: a matrix may be stored as numbers after all."""
    weight = f"{name}.weight"
    return format.group_of(checkpoint.shape(weight)[-1] if weight in checkpoint else 0)


def coded_matrices(checkpoint: Checkpoint, names: Sequence[str]) -> dict[str, WeightFormat]:
    """The matrices that are stored as codes, and how.  names: of tensors."""
    matrices = {name.rpartition(".")[0] for name in names if MATRICES.search(name)}
    matrices |= {name.removesuffix("_blocks") for name in names if name.endswith("_blocks")}
    return {name: format for name in matrices if (format := checkpoint.format_of(name)) is not None}


def coded_and_others(checkpoint: Checkpoint, names: Sequence[str]) -> tuple[dict[str, WeightFormat], list[str]]:
    """As `coded_matrices`, and the tensors of ordinary numbers, the biases of coded matrices among them."""
    formats = coded_matrices(checkpoint, names)
    codes = {f"{name}_{ending}" for name in formats for ending in ("blocks", "scales")}
    return formats, [n for n in names if n not in codes and (n.rpartition(".")[0] not in formats or n.endswith(".bias"))]
