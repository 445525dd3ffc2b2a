"""Tensors that hold one projection of all experts of a layer, seen as each expert's own, under the names that the hub has.

transformers 5 computes with `experts.gate_up_proj` [E, 2F, H], gates above ups, and `experts.down_proj` [E, H, F], and such
tensors stand in files that other tools save from its models.  gpt-oss's files have [E, H, 2F] and [E, F, H], in which gates and
ups alternate, Qwen3-VL's the same shapes with gates first, and Granite's other names.  Every reader here, of names, sizes,
formats and numbers, knows `experts.{number}.gate_proj.weight` alone.  This file knows no model.

Shapes: E experts, F width of an expert, H hidden size.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import Tensor

from specdec.models.checkpoints.stored import StoredTensor

_FUSED = re.compile(r"(?P<experts>.*\.experts)\.(?P<projection>gate_up_proj|down_proj)(?P<ending>|_scale_inv)$")
# Granite's, by names of their own.
_LINEAR = re.compile(r"(?P<block>.*\.block_sparse_moe)\.(?P<projection>(in|out)put_linear)\.weight$")
_OF_LINEAR = {"input_linear": "gate_up_proj", "output_linear": "down_proj"}
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def split_fused(stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """The tensors by name, with each expert's matrices, or their scales, in place of those of all experts."""
    split: dict[str, StoredTensor] = {}
    for name, tensor in stored.items():
        found = _FUSED.match(_usual(name))
        if found is None or len(tensor.shape()) != 3:
            split[name] = tensor
        else:
            experts, parts = found["experts"], _PARTS[found["projection"]]
            alternate = f"{experts}.gate_up_proj_bias" in stored
            dim = 2 if alternate or _lies_by_columns(experts, stored) else 1
            if found["ending"]:
                _expect_whole_blocks(name, tensor, stored.get(name.removesuffix(found["ending"])), len(parts), dim)
            else:
                _expect_halves(name, tensor, len(parts), dim)
            each = dict(_each(tensor, experts, parts, found["ending"], dim == 2, alternate))
            if twice := sorted(each.keys() & stored.keys()):
                raise ValueError(
                    f"{tensor.file}: tensor {name!r} holds the matrices of all experts, but {twice[0]!r} is there too "
                    f"({len(twice)} are there twice); nearest thing that works: either of the two alone"
                )
            split |= each
    return split


def _lies_by_columns(experts: str, stored: Mapping[str, StoredTensor]) -> bool:
    """Whether an expert's matrices are [H, 2F] and [F, H], by both shapes together, which no other layout has."""
    both = [stored[name].shape() for part in _PARTS if (name := f"{experts}.{part}") in stored]
    if len(both) < 2 or any(len(shape) != 3 for shape in both):
        return False
    (_, hidden, wide), (_, width, out) = both
    return hidden == out and wide == 2 * width


def _usual(name: str) -> str:
    """The name, or what others call such a tensor."""
    found = _LINEAR.match(name)
    return name if found is None else f"{found['block']}.experts.{_OF_LINEAR[found['projection']]}"


def _expect_halves(name: str, tensor: StoredTensor, parts: int, dim: int) -> None:
    """ValueError if the rows, which lie along that dimension, are not as many for each part."""
    if tensor.shape()[dim] % parts:
        raise ValueError(
            f"{tensor.file}: tensor {name!r} must hold as many rows of gates as of ups, got {tensor.shape()[dim]} rows, by its "
            f"shape {tensor.shape()}"
        )


def _expect_whole_blocks(name: str, scales: StoredTensor, weight: StoredTensor | None, parts: int, dim: int) -> None:
    """ValueError if a scale is for rows of two projections, or if what it scales is not there.  dim: along which rows lie."""
    if weight is None or len(weight.shape()) != 3:
        found = "none" if weight is None else f"one of shape {weight.shape()}"
        raise ValueError(
            f"{scales.file}: tensor {name!r} needs {name.removesuffix('_scale_inv')!r} beside it, of three dimensions, "
            f"got {found}"
        )
    rows, count = weight.shape()[dim], scales.shape()[dim]
    if not count or not rows or rows % count or rows // parts % (rows // count):
        raise ValueError(
            f"{scales.file}: tensor {name!r} has {count} blocks for {rows} rows, so one is for gates and ups together; nearest "
            "thing that works: each expert's matrices apart, as `experts.0.gate_proj.weight`"
        )


def _each(
    tensor: StoredTensor, experts: str, parts: tuple[str, ...], ending: str, transposed: bool, alternate: bool
) -> Iterator[tuple[str, StoredTensor]]:
    """transposed: whether a matrix lies by columns.  alternate: whether its rows of gates and ups do, as gpt-oss's."""
    E, *sizes = tensor.shape()
    rows, columns = reversed(sizes) if transposed else sizes
    size = rows // len(parts)
    for expert in range(E):
        for place, part in enumerate(parts):
            own = slice(place, rows, len(parts)) if alternate else slice(place * size, (place + 1) * size)

            def shape(size: tuple[int, int] = (len(range(rows)[own]), columns)) -> tuple[int, ...]:
                return size

            def read(expert: int = expert, own: slice = own) -> Tensor:
                matrix = tensor.read()[expert]
                return (matrix.T if transposed else matrix)[own]

            yield f"{experts}.{expert}.{part}.weight{ending}", tensor._replace(shape=shape, read=read)
