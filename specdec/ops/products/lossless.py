"""Products of activations with a weight that is kept twice: packed, which few rows read, and as it is, for all others.

The packed weight is read on Hopper GPUs, up to the number of rows for which it was measured to be faster (tiles.py); everything
else is `linear`.  This module knows no model.

Shapes: T rows, I in, O out, F of a gated pair.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.ops.launch import has_pdl, use_kernels
from specdec.ops.products.dense import gated_linear, linear, linear_terms, tma_reads
from specdec.ops.products.formats.lossless import Packed
from specdec.ops.products.gpus import match_of
from specdec.ops.products.numerics import Numerics
from specdec.ops.products.terms import Terms
from specdec.ops.products.tiles.lossless import packed_tiles
from specdec.ops.products.tiles.quantised import HopperTiles


def packed_linear(x_TI: Tensor, weight_OI: Tensor, packed: Packed, bias_O: Tensor | None, numerics: Numerics) -> Tensor:
    """x W^T + bias: [T, O].  packed: of weight_OI."""
    if tiles := _tiles(x_TI, packed, False, numerics):
        return _launch(x_TI, packed, bias_O, False, tiles)
    return linear(x_TI, weight_OI, bias_O, numerics)


def packed_linear_terms(
    x_TI: Tensor, weight_OI: Tensor, packed: Packed, bias_O: Tensor | None, numerics: Numerics
) -> Tensor | Terms:
    """`packed_linear`, or its terms where programs of its kernel share columns."""
    tiles = _tiles(x_TI, packed, False, numerics)
    if tiles is None:
        return linear_terms(x_TI, weight_OI, bias_O, numerics)
    y = _launch(x_TI, packed, bias_O, False, tiles, leaves=tiles.splits > 1)
    return Terms(y, x_TI.dtype) if tiles.splits > 1 else y


def packed_gated_linear(x_TI: Tensor, weight_2FI: Tensor, packed: Packed, bias_2F: Tensor | None, numerics: Numerics) -> Tensor:
    """silu(gate) * up: [T, F].  The first F rows of W are the gate's, the other F are up's."""
    if tiles := _tiles(x_TI, packed, True, numerics):
        return _launch(x_TI, packed, bias_2F, True, tiles)
    return gated_linear(x_TI, weight_2FI, bias_2F, numerics)


def reads_packed(packed: Packed, rows: int) -> bool:
    """Whether products of that many rows read the packed weight."""
    device = packed.low_OJ.device
    return device.type == "cuda" and packed_tiles(rows, packed.rows, packed.columns, False, match_of(device).kind) is not None


def _launch(x: Tensor, packed: Packed, bias: Tensor | None, gated: bool, tiles: HopperTiles, leaves: bool = False) -> Tensor:
    from specdec.ops.products.kernels.quantised.hopper_launch import launch_quantised_hopper

    return launch_quantised_hopper(x, packed, bias, gated, tiles, leaves)


def _tiles(x: Tensor, packed: Packed, gated: bool, numerics: Numerics) -> HopperTiles | None:
    """The kernel's tiles; None where the ordinary weight is read."""
    if not use_kernels(x) or x.dim() != 2 or x.stride(1) != 1 or x.dtype != torch.bfloat16:
        return None
    if numerics.is_invariant or not has_pdl(x.device) or not tma_reads(x, packed.low_OJ):
        return None
    match = match_of(x.device)
    return packed_tiles(x.shape[0], packed.rows, packed.columns, gated, match.kind) if match.hopper else None
