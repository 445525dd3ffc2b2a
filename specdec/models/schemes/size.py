"""Which matrices of a checkpoint are in 8 or 4 bits, and how many bytes each takes, by headers alone.  No tensor is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.schemes.source import WeightFormat
from specdec.ops.products.formats.experts import POWERS, scales_form, step_bytes, steps_of
from specdec.ops.products.formats.quantised import Kind, row_bytes

EXPERTS = ".experts."  # in the names of experts' matrices
# Names of tensors of matrices that may be stored in 8 or 4 bits, draft heads' too.  What expands latents is dequantised as it
# is loaded.
MATRICES = re.compile(
    r"((?<!kv_b)(?<!eh)(?<!input)_proj(_with_mqa)?|\.in_proj_\w+|\.wq_b|\.wk|\.w[123]|put_linear|\bfc|lm_head"
    r"|(kernel|hidden)_projection|markov_w2|confidence_head\.proj)\.\w+$"
)


Held = Callable[[str, tuple[int, ...]], tuple[int, ...]]  # from a tensor's name and shape to what is held of it


def all_of_it(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape


class MatrixSize(NamedTuple):
    """bytes: of its quantised values, scales and zero points, as schemes/parameters.py or, of experts, schemes/stacks.py keeps
    them.

    values: rows times columns.  is_dequantised: whether some products need a dense copy of the matrix, which takes memory too.
    """

    bytes: int
    values: int
    is_dequantised: bool


def matrix_size(format: WeightFormat, checkpoint: Checkpoint, name: str, held: Held = all_of_it) -> MatrixSize:
    kind, rows, columns, group_size, scale_bytes, has_zero_points = format.outline(checkpoint, name)
    rows, columns = held(name, (rows, columns))
    groups, values = -(-columns // (group_size or columns)), rows * columns
    scaled = groups * (scale_bytes + int(has_zero_points))
    if EXPERTS not in name:
        return MatrixSize(rows * (row_bytes(kind, columns) + scaled), values, True)
    form, steps = scales_form(kind, group_size), steps_of(columns)
    return MatrixSize(rows * (steps * step_bytes(kind) + (steps * POWERS if form == "powers" else scaled)), values, not form)


def kind_of_experts(checkpoint: Checkpoint) -> Kind | None:
    """The quantised values of the first expert's first matrix; None: they are dense, or there are none."""
    named = (name for name in checkpoint.names() if EXPERTS in name and (MATRICES.search(name) or name.endswith("_blocks")))
    for name, format in quantised_matrices(checkpoint, [next(named, "")]).items():
        return format.outline(checkpoint, name).kind
    return None


def group_size_of(checkpoint: Checkpoint, name: str, format: WeightFormat) -> int:
    """Columns of a scale in a matrix; 0: all of a row.  This reads no scale: a matrix of that name may turn out to be dense."""
    weight = f"{name}.weight"
    return format.group_size_of(checkpoint.shape(weight)[-1] if weight in checkpoint else 0)


def quantised_matrices(checkpoint: Checkpoint, names: Sequence[str]) -> dict[str, WeightFormat]:
    """The matrices that are quantised, and how.  names: of tensors."""
    matrices = {name.rpartition(".")[0] for name in names if MATRICES.search(name)}
    matrices |= {name.removesuffix("_blocks") for name in names if name.endswith("_blocks")}
    return {name: format for name in matrices if (format := checkpoint.format_of(name)) is not None}


def quantised_and_dense(checkpoint: Checkpoint, names: Sequence[str]) -> tuple[dict[str, WeightFormat], list[str]]:
    """As `quantised_matrices`, and all other tensors, the biases of quantised matrices among them."""
    formats = quantised_matrices(checkpoint, names)
    blocks = {f"{name}_{ending}" for name in formats for ending in ("blocks", "scales")}
    return formats, [n for n in names if n not in blocks and (n.rpartition(".")[0] not in formats or n.endswith(".bias"))]
