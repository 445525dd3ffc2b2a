"""A weight that is kept twice: in 12 bits a value without loss, which few rows read, and dense, for all others.

The 12 bits are read on Hopper GPUs, up to the number of rows for which that was measured to be faster (tiles/lossless.py);
everything else is dense.py's.  This module knows no model.

Shapes: M rows, K in, N out, F of a gated pair, R rows asked for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.ops.launch import has_pdl, use_kernels
from specdec.ops.products.dense import DenseWeight, tma_reads
from specdec.ops.products.formats.lossless import LosslessMatrix
from specdec.ops.products.gpus import GpuKind, match_of
from specdec.ops.products.numerics import FAST, Numerics
from specdec.ops.products.partials import Partials
from specdec.ops.products.tiles.quantised import QuantisedTiles


class LosslessWeight(NamedTuple):
    """See `Weight`.  lossless: the dense weight in 12 bits."""

    dense: DenseWeight
    lossless: LosslessMatrix

    def matmul(self, x_MK: Tensor, bias_N: Tensor | None, numerics: Numerics, *, partials: bool = False) -> Tensor | Partials:
        tiles = self._tiles(x_MK, False, numerics)
        if tiles is None:
            return self.dense.matmul(x_MK, bias_N, numerics, partials=partials)
        store_partials = partials and tiles.splits > 1
        y = self._launch(x_MK, bias_N, False, tiles, store_partials)
        return Partials(y, x_MK.dtype) if store_partials else y

    def gated(self, x_MK: Tensor, bias_2F: Tensor | None, numerics: Numerics) -> Tensor:
        if tiles := self._tiles(x_MK, True, numerics):
            return self._launch(x_MK, bias_2F, True, tiles)
        return self.dense.gated(x_MK, bias_2F, numerics)

    def rows(self, ids_R: Tensor) -> Tensor:
        return self.dense.rows(ids_R)

    def read_bytes(self, rows: int, kind: GpuKind | None = None) -> int:
        lossless, device = self.lossless, self.lossless.low_NJ.device
        if kind is None and device.type == "cuda":
            kind = match_of(device).kind
        if kind is not None and FAST.lossless_tiles(rows, lossless.rows, lossless.columns, False, kind) is not None:
            return lossless.num_bytes
        return self.dense.read_bytes(rows)

    def _launch(self, x: Tensor, bias: Tensor | None, gated: bool, tiles: QuantisedTiles, partials: bool = False) -> Tensor:
        from specdec.ops.products.kernels.quantised.hopper_launch import launch_quantised_hopper

        return launch_quantised_hopper(x, self.lossless, bias, gated, tiles, partials)

    def _tiles(self, x: Tensor, gated: bool, numerics: Numerics) -> QuantisedTiles | None:
        """The kernel's tiles; None where the dense weight is read."""
        if not use_kernels(x) or x.dim() != 2 or x.stride(1) != 1 or x.dtype != torch.bfloat16:
            return None
        if not has_pdl(x.device) or not match_of(x.device).hopper or not tma_reads(x, self.lossless.low_NJ):
            return None
        return numerics.lossless_tiles(x.shape[0], self.lossless.rows, self.lossless.columns, gated, match_of(x.device).kind)
