"""gpt-oss's experts in a GGUF file, in the layout of openai's own checkpoints: mxfp4's blocks and exponents in tensors apart.

The file has gate and up projections apart, and the first half of a block's columns in the low halves of its bytes; the
checkpoints alternate rows of gate and up, and two neighbouring columns in a byte.  No value changes.

Shapes: E experts, N rows of an expert's matrix, G blocks of 32 columns of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from specdec.models.checkpoints.stored import StoredTensor
from specdec.models.gguf.blocks import BLOCKS, FLOATS, dense_values
from specdec.models.gguf.file import GgufFile

EXPERTS = ".mlp.experts."  # in the names of experts' tensors
_TYPE = "MXFP4"
_BLOCK = BLOCKS[_TYPE].bytes  # of which the first is an exponent, and each of the others two columns
_ENDINGS = ("weight", "bias")
_PARTS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down_proj",)}


def expert_tensors(file: GgufFile, names: Mapping[str, str]) -> dict[str, StoredTensor]:
    """Blocks, scales and biases of each layer's two projections.  names: the file's, by those of architectures.py."""
    tensors: dict[str, StoredTensor] = {}
    for prefix in dict.fromkeys(f"{other.partition(EXPERTS)[0]}{EXPERTS}" for other in names):
        for projection, parts in _PARTS.items():
            weights, biases = ([_name(file, names, f"{prefix}{part}.{ending}") for part in parts] for ending in _ENDINGS)
            tensors |= _projection(file, f"{prefix}{projection}", weights, biases)
    return tensors


def _name(file: GgufFile, names: Mapping[str, str], other: str) -> str:
    if other not in names:
        raise ValueError(f"{file.path}: the tensor of {other} is missing; expected gate, up and down projections with biases")
    return names[other]


def _projection(file: GgufFile, name: str, weights: list[str], biases: list[str]) -> dict[str, StoredTensor]:
    """weights, biases: of its parts, whose rows alternate."""
    stored = [file.tensors[weight] for weight in weights]
    for own, tensor in zip(weights, stored):
        if tensor.type != _TYPE or len(tensor.shape) != 3 or tensor.shape != stored[0].shape:
            raise ValueError(
                f"{file.path}: tensor {own!r} must hold experts in {_TYPE}, alike in all projections of a layer, got "
                f"{tensor.type} of shape {tensor.shape}; nearest thing that works: a file whose experts are as openai "
                "published them"
            )
    for own in biases:
        if file.tensors[own].type not in FLOATS or file.tensors[own].shape != stored[0].shape[:2]:
            found = file.tensors[own]
            raise ValueError(f"{file.path}: tensor {own!r} must hold a number for each row, got {found.type} of {found.shape}")
    E, N = stored[0].shape[0], stored[0].shape[1] * len(weights)
    G = stored[0].row_bytes // _BLOCK

    def blocks_ENGB() -> Tensor:
        apart = [torch.from_numpy(file.read(own)).view(E, -1, G, _BLOCK) for own in weights]
        return torch.stack(apart, dim=2).flatten(1, 2)

    def qvalues() -> Tensor:
        halves = blocks_ENGB()[..., 1:]
        columns = torch.cat((halves & 15, halves >> 4), dim=-1)
        return columns[..., ::2] | columns[..., 1::2] << 4

    def bias() -> Tensor:
        apart = [dense_values(torch.from_numpy(file.read(own)), file.tensors[own].type).view(E, -1) for own in biases]
        return torch.stack(apart, dim=2).flatten(1)

    def stored_as(shape: tuple[int, ...], dtype: str, read: Callable[[], Tensor]) -> StoredTensor:
        return StoredTensor(file.path, lambda: shape, lambda: dtype, read)

    return {
        f"{name}_blocks": stored_as((E, N, G, _BLOCK - 1), "U8", qvalues),
        f"{name}_scales": stored_as((E, N, G), "U8", lambda: blocks_ENGB()[..., 0].contiguous()),
        f"{name}_bias": stored_as((E, N), file.tensors[biases[0]].type, bias),
    }
