"""Matrices of weights, each of named parts: queries, keys and values of a projection, or a gate and what it opens.

A layer multiplies through `Linear` and reads none of its bytes.  A loader asks for the tensors of one part, by their names in a
checkpoint, and fills them.  So this file alone knows how a matrix is stored.  It knows no checkpoint and no model.

Shapes: T tokens, I columns, O rows, F rows of a gate, N matrices of a stack, R rows asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from specdec.ops.products.linear import gated_linear, linear
from specdec.ops.products.numerics import FAST, Numerics
from specdec.parallel.shard import Shard

Role = Literal["column", "row"]
ONLY = ""  # the name of the only part of a matrix that has no parts


class Parts:
    """The rows of each part of a matrix, in the order in which the parts lie one above the other.

    sizes: rows of each part by its name, or the rows of a matrix without parts.
    """

    def __init__(self, sizes: int | Mapping[str, int]) -> None:
        self.sizes = {ONLY: sizes} if isinstance(sizes, int) else dict(sizes)
        ends = list(accumulate(self.sizes.values()))
        self.rows = {name: slice(end - size, end) for (name, size), end in zip(self.sizes.items(), ends)}
        self.total = ends[-1]


class Stored(NamedTuple):
    """What a rank holds of one of a checkpoint's tensors.

    tensor: to be filled.  shape: of the checkpoint's tensor, of which this is the run along dimension `dim` from `start` on.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    dim: int = 0
    start: int = 0

    def run(self, whole: Tensor) -> Tensor:
        """The part of the checkpoint's tensor that belongs here."""
        return whole.narrow(self.dim, self.start, self.tensor.shape[self.dim])


class _Cut(NamedTuple):
    """The run of a part along dimension `dim` of the checkpoint's tensor, which is `whole` long there."""

    dim: int
    start: int
    whole: int

    def stored(self, tensor: Tensor) -> Stored:
        shape = (*tensor.shape[: self.dim], self.whole, *tensor.shape[self.dim + 1 :])
        return Stored(tensor, shape, self.dim, self.start)


class Multiplying(nn.Module):
    """A module with products of its own.  numerics: the policy that chooses them for each number of rows."""

    numerics: Numerics = FAST


class Linear(Multiplying):
    """x W^T + bias, from [..., I] to [..., O].

    The weights stay uninitialised until a loader fills them: random initial values would never be read, and computing them
    would be the slowest part of a start.
    in_features: I.  parts: rows of the parts, as of `Parts`; O is their sum.

    Ranks that share a model hold a cut of a matrix each.  `column`: some rows of each part, so that a rank has some of the
    outputs.  `row`: some columns, so that each rank's product is one of the terms of the output.  All sizes are the rank's own.
    unread: endings of tensors of the checkpoint of which this rank holds nothing.
    """

    def __init__(self, in_features: int, parts: int | Mapping[str, int], bias: bool = False) -> None:
        super().__init__()
        self.parts = Parts(parts)
        self.in_features, self.out_features = in_features, self.parts.total
        self.weight = nn.Parameter(torch.empty(self.out_features, in_features))
        self.bias = nn.Parameter(torch.empty(self.out_features)) if bias else None
        self._cuts = {part: _Cut(0, 0, size) for part, size in self.parts.sizes.items()}
        self.unread: tuple[str, ...] = ()

    @classmethod
    def column(
        cls,
        in_features: int,
        parts: Mapping[str, int],
        shard: Shard,
        bias: bool = False,
        copies: Mapping[str, int] | None = None,
    ) -> Linear:
        """Some rows of each part.  copies: for a part, how many neighbouring ranks hold the same rows of it; 1 if left out."""
        matrix = cls(in_features, parts, bias)
        for part, size in parts.items():
            same = (copies or {}).get(part, 1)
            matrix._cuts[part] = _Cut(0, shard.rank // same * size, shard.size // same * size)
        return matrix

    @classmethod
    def row(cls, in_features: int, out_features: int, shard: Shard, bias: bool = False) -> Linear:
        """Some columns.  The first rank alone has the bias, for the outputs of all ranks are summed."""
        matrix = cls(in_features, out_features, bias and shard.rank == 0)
        matrix._cuts[ONLY] = _Cut(1, shard.rank * in_features, shard.size * in_features)
        matrix.unread = ("bias",) if bias and shard.rank > 0 else ()
        return matrix

    @classmethod
    def vocabulary(cls, in_features: int, rows: int, shard: Shard) -> Linear:
        """Some of the rows, one for each token: a run of them on each rank, of which the last ones may be shorter."""
        own = shard.piece(rows)
        matrix = cls(in_features, own.stop - own.start)
        matrix._cuts[ONLY] = _Cut(0, own.start, rows)
        return matrix

    @classmethod
    def of(cls, weight_OI: Tensor, bias_O: Tensor | None = None) -> Linear:
        """A matrix without parts over weights that another module owns too."""
        with torch.device("meta"):
            shared = cls(weight_OI.shape[1], weight_OI.shape[0])
        assert isinstance(weight_OI, nn.Parameter) and (bias_O is None or isinstance(bias_O, nn.Parameter))
        shared.weight, shared.bias = weight_OI, bias_O
        return shared

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.numerics)

    def gated(self, x_TI: Tensor) -> Tensor:
        """silu(gate) * up: [T, F], where the gate is the product with the first half of the rows, and up with the second."""
        return gated_linear(x_TI, self.weight, self.bias, self.numerics)

    def by_head(self, heads: int) -> Tensor:
        """The weight [heads, O / heads, I], for products with each head's rows."""
        return self.weight.unflatten(0, (heads, -1))

    def rows(self, ids_R: Tensor) -> Tensor:
        """The rows [R, I] of these numbers, counted over all parts."""
        return self.weight[ids_R]

    def tensors(self, part: str = ONLY) -> dict[str, Stored]:
        """What is stored of a part, by the ending of its name in checkpoints.  Filling it fills the matrix."""
        rows, cut = self.parts.rows[part], self._cuts[part]
        stored = {"weight": cut.stored(self.weight.detach()[rows])}
        if self.bias is not None:
            bias_P = self.bias.detach()[rows]
            stored["bias"] = cut.stored(bias_P) if cut.dim == 0 else Stored(bias_P, tuple(bias_P.shape))
        return stored

    def holds(self, table: Tensor) -> bool:
        """Whether the weight is this very tensor, as the language-model head of a model with tied embeddings is."""
        return self.weight.data_ptr() == table.data_ptr()

    @property
    def num_bytes(self) -> int:
        """Bytes that a product reads of the matrix."""
        return sum(stored.numel() * stored.element_size() for stored in self.parameters())


def use_numerics(model: nn.Module, numerics: Numerics) -> None:
    """Makes all of a model's products follow that policy."""
    for module in model.modules():
        if isinstance(module, Multiplying):
            module.numerics = numerics


class LinearStack(nn.Module):
    """N matrices of one shape and with the same parts, such as one projection of all experts of a layer.  No bias.

    weight_NOI: who multiplies with them chooses the product by their number and dtype (models/experts.py).
    shard, role: of all matrices, as `Linear.column` and `Linear.row` cut one.
    """

    def __init__(self, count: int, in_features: int, parts: Mapping[str, int], shard: Shard, role: Role) -> None:
        super().__init__()
        self.parts, self._shard, self._role = Parts(parts), shard, role
        self.weight_NOI = nn.Parameter(torch.empty(count, self.parts.total, in_features))

    def tensors(self, index: int, part: str) -> dict[str, Stored]:
        """What is stored of a part of matrix number `index`.  See `Linear.tensors`."""
        weight_PI = self.weight_NOI.detach()[index, self.parts.rows[part]]
        dim = 0 if self._role == "column" else 1
        size = weight_PI.shape[dim]
        return {"weight": _Cut(dim, self._shard.rank * size, self._shard.size * size).stored(weight_PI)}
