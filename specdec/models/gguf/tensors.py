"""The tensors of a GGUF file under Hugging Face's names and in its order of rows, each read when it is asked for.

Every tensor of the file has a name here, or is an error.  Blocks are dequantised, unless a matrix is asked for as its blocks,
whose quantised values then stay (kept_blocks.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from specdec.models.checkpoints.stored import StoredTensor
from specdec.models.gguf.architectures import ROPE_FACTORS, find_architecture, other_name
from specdec.models.gguf.blocks import FLOATS, dense_values
from specdec.models.gguf.experts import EXPERTS, expert_tensors
from specdec.models.gguf.file import GgufFile, open_gguf

_TURNED = {"self_attn.q_proj": "head_count", "self_attn.k_proj": "head_count_kv"}  # and the key that counts their heads


def gguf_tensors(path: Path, as_blocks: Callable[[str], bool]) -> dict[str, StoredTensor]:
    """Every tensor, by Hugging Face's name.

    as_blocks: whether the matrix of that name is asked for as its blocks, uint8 [O, bytes of a row].
    ValueError names tensors of the file that are not known.
    """
    file = open_gguf(path)
    names = {other: name for name, other in names_of(file).items()}
    plain = {other: name for other, name in names.items() if EXPERTS not in other}
    tensors = {other: _stored(file, name, other, as_blocks(other.removesuffix(".weight"))) for other, name in plain.items()}
    return tensors | expert_tensors(file, {other: name for other, name in names.items() if EXPERTS in other})


def names_of(file: GgufFile) -> dict[str, str]:
    """Hugging Face's name of each tensor of the file, but for rope's factors, which rope.py reads."""
    architecture = find_architecture(file)
    names = {name: other_name(architecture, name) for name in file.tensors if name != ROPE_FACTORS}
    if unknown := sorted(name for name, other in names.items() if other is None):
        raise ValueError(
            f"{file.path}: {len(unknown)} tensors are not part of a {file.architecture} model: {', '.join(unknown[:8])}"
        )
    return {name: other for name, other in names.items() if other is not None}


def _stored(file: GgufFile, name: str, other: str, as_blocks: bool) -> StoredTensor:
    tensor = file.tensors[name]
    shape = (*tensor.shape[:-1], tensor.row_bytes) if as_blocks else tensor.shape
    dtype = "U8" if as_blocks else tensor.type if tensor.type in FLOATS else "F32"
    order = _row_order(file, other)

    def read() -> Tensor:
        rows = torch.from_numpy(file.read(name))
        if len(tensor.shape) == 1 and tensor.type in FLOATS:  # a bias or a norm: each number is a row
            rows = rows.view(-1, FLOATS[tensor.type].itemsize)
        rows = rows if order is None else order(rows)
        return (rows if as_blocks else dense_values(rows, tensor.type)).view(shape)

    return StoredTensor(file.path, lambda: shape, lambda: dtype, read)


def _row_order(file: GgufFile, other: str) -> Callable[[Tensor], Tensor] | None:
    """How the rows of a tensor come into Hugging Face's order; None where they lie in it.

    In llama.cpp's files of Llamas, the rows that rope turns together lie side by side; here they lie half a head apart.
    """
    key = next((key for part, key in _TURNED.items() if other.rpartition(".")[0].endswith(part)), None)
    if key is None or not find_architecture(file).turned:
        return None
    attention = f"{file.architecture}.attention"
    heads = file.keys.get(f"{attention}.{key}", file.keys.get(f"{attention}.head_count"))
    if type(heads) is not int or heads < 1:
        raise ValueError(f"{file.path}: {attention}.{key} must be a whole number of at least 1, got {heads!r}")
    return partial(_halves_apart, heads=heads, where=f"{file.path}: {other}")


def _halves_apart(rows: Tensor, heads: int, where: str) -> Tensor:
    if len(rows) % (2 * heads):
        raise ValueError(f"{where} has {len(rows)} rows, which are no whole pairs of {heads} heads")
    return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
