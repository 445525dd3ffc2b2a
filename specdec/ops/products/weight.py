"""What a layer asks of a weight, however it is stored.  Knows no way of storing one.

Shapes: M rows of x, K in, N out (rows of the weight), F of a gated pair, R rows asked for.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from specdec.ops.products.gpus import GpuKind
from specdec.ops.products.numerics import Numerics
from specdec.ops.products.partials import Partials


class Weight(Protocol):
    """A matrix [N, K]."""

    def matmul(self, x_MK: Tensor, bias_N: Tensor | None, numerics: Numerics, *, partials: bool = False) -> Tensor | Partials:
        """x W^T + bias: [M, N].

        partials: whether the caller can add up split-K partials.  Adding them up in the product's kernel costs one more wait.
        """

    def gated(self, x_MK: Tensor, bias_2F: Tensor | None, numerics: Numerics) -> Tensor:
        """silu(gate) * up: [M, F].  The first F rows of the weight are the gate's, the other F are up's."""

    def rows(self, ids_R: Tensor) -> Tensor:
        """[R, K]: the rows with these indices."""

    def read_bytes(self, rows: int, kind: GpuKind | None = None) -> int:
        """Bytes of the weight that a product of that many rows reads.  kind: of GPU; None: of the one where the weight lies."""
