"""A weight in 8 or 4 bits.

On a CPU, under autograd and in a trace its products are as defined: the weight is dequantised to x's dtype, and multiplied.  On
a GPU a kernel converts the quantised values on their way to the tensor cores, for the rows that tiles/quantised.py names.  For
more rows the weight is dequantised into memory that cuBLAS reads.  This module knows no model.

Shapes: M rows, K in, N out, F of a gated pair, R rows asked for, G scales of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.ops.launch import has_pdl, use_kernels
from specdec.ops.products.dense import silu_mul, tma_reads
from specdec.ops.products.formats.quantised import QuantisedMatrix, dequantise
from specdec.ops.products.gpus import GpuKind, match_of
from specdec.ops.products.numerics import Numerics
from specdec.ops.products.partials import Partials
from specdec.ops.products.tiles.quantised import QuantisedTiles
from specdec.ops.rows import take_columns


class QuantisedWeight(NamedTuple):
    """See `Weight`.

    order_K: which of the model's columns each column of `matrix` is, where these are sorted by their groups (act order); None:
        the same.
    """

    matrix: QuantisedMatrix
    order_K: Tensor | None = None

    def matmul(self, x_MK: Tensor, bias_N: Tensor | None, numerics: Numerics, *, partials: bool = False) -> Tensor | Partials:
        """With more than FEW rows tiles may differ where partials are asked for, and so may the last bits of their sum."""
        x_MK = self._ordered(x_MK)
        if partials:
            tiles = self._tiles(x_MK, False, numerics, partials=True)
            if tiles is not None and tiles.kernel != "stream_triton" and tiles.splits > 1:
                return Partials(self._launch(x_MK, bias_N, False, tiles, store_partials=True), x_MK.dtype)
        if tiles := self._tiles(x_MK, False, numerics):
            return self._launch(x_MK, bias_N, False, tiles)
        return F.linear(x_MK, self._dequantised(x_MK), bias_N)

    def gated(self, x_MK: Tensor, bias_2F: Tensor | None, numerics: Numerics) -> Tensor:
        x_MK = self._ordered(x_MK)
        if tiles := self._tiles(x_MK, True, numerics):
            return self._launch(x_MK, bias_2F, True, tiles)
        return silu_mul(F.linear(x_MK, self._dequantised(x_MK), bias_2F))

    def rows(self, ids_R: Tensor) -> Tensor:
        whole = self.matrix
        zero_points_RG = None if whole.zero_points_NG is None else whole.zero_points_NG[ids_R]
        own = whole._replace(
            qweight_NJ=whole.qweight_NJ[ids_R], scales_NG=whole.scales_NG[ids_R], zero_points_NG=zero_points_RG
        )  # fmt: skip
        return in_model_order(dequantise(own, whole.scales_NG.dtype), self.order_K)

    def read_bytes(self, rows: int, kind: GpuKind | None = None) -> int:
        stored = self.matrix.qweight_NJ, self.matrix.scales_NG, self.matrix.zero_points_NG
        return sum(tensor.numel() * tensor.element_size() for tensor in stored if tensor is not None)

    def _ordered(self, x: Tensor) -> Tensor:
        """x with its columns sorted as those of `matrix` are."""
        return x if self.order_K is None else take_columns(x, self.order_K)

    def _dequantised(self, x: Tensor) -> Tensor:
        """The dense weight [N, K] in x's dtype."""
        if not use_kernels(x) or self.matrix.scales_NG.dtype == torch.float64:  # scales have 64 bits while a text is proven
            return dequantise(self.matrix, x.dtype)
        from specdec.ops.products.kernels.quantised.dequantise_triton import launch_dequantise

        return launch_dequantise(self.matrix, x.dtype)

    def _launch(
        self, x: Tensor, bias: Tensor | None, gated: bool, tiles: QuantisedTiles, store_partials: bool = False
    ) -> Tensor:
        if tiles.kernel == "stream_triton":
            from specdec.ops.products.kernels.quantised.stream_triton import launch_quantised_linear

            return launch_quantised_linear(x, self.matrix, bias, gated, tiles)
        from specdec.ops.products.kernels.quantised.hopper_launch import launch_quantised_hopper

        return launch_quantised_hopper(x, self.matrix, bias, gated, tiles, store_partials)

    def _tiles(self, x: Tensor, gated: bool, numerics: Numerics, partials: bool = False) -> QuantisedTiles | None:
        """A kernel's tiles; None where none runs.  partials: whether a norm may add up what splits have computed."""
        if not use_kernels(x) or x.dim() != 2 or x.stride(1) != 1 or x.dtype == torch.float32 or not has_pdl(x.device):
            return None
        weight = self.matrix
        hopper = x.dtype == torch.bfloat16 and match_of(x.device).hopper and tma_reads(x, weight.qweight_NJ)
        return numerics.quantised_tiles(
            x.shape[0], weight.qweight_NJ.shape[0], weight.columns, weight.kind, weight.group_size,
            weight.zero_points_NG is not None, gated, partials, hopper,
        )  # fmt: skip


def in_model_order(dense_RK: Tensor, order_K: Tensor | None) -> Tensor:
    """Dense values whose columns are sorted by their groups, in the order of the model's columns."""
    return dense_RK if order_K is None else torch.empty_like(dense_RK).index_copy_(1, order_K.long(), dense_RK)
