"""Matrices of weights, each of named parts: queries, keys and values of a projection, or a gate and what it opens.

A layer multiplies through `Linear` and reads none of its bytes.  A loader asks for the tensors of one part, by their names in a
checkpoint, and fills them.  So this file alone knows how a matrix is stored.  It knows no checkpoint and no model.

Shapes: T tokens, I columns, O rows, F rows of a gate, N matrices of a stack, R rows asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor, nn

from specdec.ops.products.linear import gated_linear, linear

WHOLE = ""  # the name of the only part of a matrix that has no parts


class Parts:
    """The rows of each part of a matrix, in the order in which the parts lie one above the other.

    sizes: rows of each part by its name, or the rows of a matrix without parts.
    """

    def __init__(self, sizes: int | Mapping[str, int]) -> None:
        self.sizes = {WHOLE: sizes} if isinstance(sizes, int) else dict(sizes)
        ends = list(accumulate(self.sizes.values()))
        self.rows = {name: slice(end - size, end) for (name, size), end in zip(self.sizes.items(), ends)}
        self.total = ends[-1]


class Linear(nn.Module):
    """x W^T + bias, from [..., I] to [..., O].

    The weights stay uninitialised until a loader fills them: random initial values would never be read, and computing them
    would be the slowest part of a start.
    in_features: I.  parts: rows of the parts, as of `Parts`; O is their sum.
    """

    def __init__(self, in_features: int, parts: int | Mapping[str, int], bias: bool = False) -> None:
        super().__init__()
        self.parts = Parts(parts)
        self.in_features, self.out_features = in_features, self.parts.total
        self.weight = nn.Parameter(torch.empty(self.out_features, in_features))
        self.bias = nn.Parameter(torch.empty(self.out_features)) if bias else None

    @classmethod
    def of(cls, weight_OI: Tensor, bias_O: Tensor | None = None) -> Linear:
        """A matrix without parts over weights that another module owns too."""
        with torch.device("meta"):
            shared = cls(weight_OI.shape[1], weight_OI.shape[0])
        assert isinstance(weight_OI, nn.Parameter) and (bias_O is None or isinstance(bias_O, nn.Parameter))
        shared.weight, shared.bias = weight_OI, bias_O
        return shared

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def gated(self, x_TI: Tensor) -> Tensor:
        """silu(gate) * up: [T, F], where the gate is the product with the first half of the rows, and up with the second."""
        return gated_linear(x_TI, self.weight, self.bias)

    def by_head(self, heads: int) -> Tensor:
        """The weight [heads, O / heads, I], for products with each head's rows."""
        return self.weight.unflatten(0, (heads, -1))

    def rows(self, ids_R: Tensor) -> Tensor:
        """The rows [R, I] of these numbers, counted over all parts."""
        return self.weight[ids_R]

    def tensors(self, part: str = WHOLE) -> dict[str, Tensor]:
        """What is stored of a part, by the ending of its name in checkpoints.  Filling it fills the matrix."""
        named = {"weight": self.weight, "bias": self.bias}
        return {name: stored.detach()[self.parts.rows[part]] for name, stored in named.items() if stored is not None}

    def holds(self, table: Tensor) -> bool:
        """Whether the weight is this very tensor, as the language-model head of a model with tied embeddings is."""
        return self.weight.data_ptr() == table.data_ptr()

    @property
    def num_bytes(self) -> int:
        """Bytes that a product reads of the matrix."""
        return sum(stored.numel() * stored.element_size() for stored in self.parameters())


class LinearStack(nn.Module):
    """N matrices of one shape and with the same parts, such as one projection of all experts of a layer.  No bias.

    weight_NOI: who multiplies with them chooses the product by their number and dtype (models/experts.py).
    """

    def __init__(self, count: int, in_features: int, parts: Mapping[str, int]) -> None:
        super().__init__()
        self.parts = Parts(parts)
        self.weight_NOI = nn.Parameter(torch.empty(count, self.parts.total, in_features))

    def tensors(self, index: int, part: str) -> dict[str, Tensor]:
        """What is stored of a part of matrix number `index`.  See `Linear.tensors`."""
        return {"weight": self.weight_NOI.detach()[index, self.parts.rows[part]]}
