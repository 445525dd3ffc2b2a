"""Products of activations with weights of 8 or 4 bits: `quantised_linear` and `quantised_gated_linear`.

On a CPU, under autograd and in a trace each function runs its definition: the weight's numbers are computed in x's dtype, and
multiplied.  On a Hopper GPU, products of up to some hundred rows use the kernels in hopper_launch.py.  Elsewhere, few rows
use the one in stream_triton.py.  For more rows the numbers are computed into a scratch that cuBLAS reads.  This module knows
no model.

Shapes: T rows, I in, O out, F of a gated pair.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.ops.launch import has_pdl, use_kernels
from specdec.ops.products.dense import silu_mul, tma_reads
from specdec.ops.products.formats.quantised import Codes, dequantise
from specdec.ops.products.gpus import match_of
from specdec.ops.products.terms import Terms
from specdec.ops.products.tiles.dense import ProductTiles
from specdec.ops.products.tiles.quantised import HopperTiles, hopper_tiles, quantised_tiles


def quantised_linear(x_TI: Tensor, weight: Codes, bias_O: Tensor | None = None) -> Tensor:
    """x W^T + bias: [T, O]."""
    if tiles := _tiles(x_TI, weight, False):
        return _launch(x_TI, weight, bias_O, False, tiles)
    return F.linear(x_TI, _numbers(x_TI, weight), bias_O)


def quantised_linear_terms(x_TI: Tensor, weight: Codes, bias_O: Tensor | None = None) -> Tensor | Terms:
    """`quantised_linear`, or terms where programs share columns.

    With more than FEW rows tiles may differ from those of `quantised_linear`, and so may the last bits of their sum.
    """
    tiles = _tiles(x_TI, weight, False, terms=True)
    if isinstance(tiles, HopperTiles) and tiles.splits > 1:
        from specdec.ops.products.kernels.quantised.hopper_launch import launch_quantised_hopper

        return Terms(launch_quantised_hopper(x_TI, weight, bias_O, False, tiles, leaves=True), x_TI.dtype)
    return quantised_linear(x_TI, weight, bias_O)


def quantised_gated_linear(x_TI: Tensor, weight: Codes, bias_2F: Tensor | None = None) -> Tensor:
    """silu(gate) * up: [T, F].  The first F rows of W are the gate's, the other F are up's."""
    if tiles := _tiles(x_TI, weight, True):
        return _launch(x_TI, weight, bias_2F, True, tiles)
    return silu_mul(F.linear(x_TI, _numbers(x_TI, weight), bias_2F))


def _numbers(x: Tensor, weight: Codes) -> Tensor:
    """The weight [O, I] in x's dtype."""
    if not use_kernels(x) or weight.scales_OG.dtype == torch.float64:  # scales have 64 bits while a text is proven
        return dequantise(weight, x.dtype)
    from specdec.ops.products.kernels.quantised.dequantise_triton import launch_dequantise

    return launch_dequantise(weight, x.dtype)


def _launch(x: Tensor, weight: Codes, bias: Tensor | None, gated: bool, tiles: ProductTiles | HopperTiles) -> Tensor:
    if isinstance(tiles, HopperTiles):
        from specdec.ops.products.kernels.quantised.hopper_launch import launch_quantised_hopper

        return launch_quantised_hopper(x, weight, bias, gated, tiles)
    from specdec.ops.products.kernels.quantised.stream_triton import launch_quantised_linear

    return launch_quantised_linear(x, weight, bias, gated, tiles)


def _tiles(x: Tensor, weight: Codes, gated: bool, terms: bool = False) -> ProductTiles | HopperTiles | None:
    """A kernel's tiles; None where none runs.  terms: whether a norm may add up what splits have computed."""
    if not use_kernels(x) or x.dim() != 2 or x.stride(1) != 1 or x.dtype == torch.float32 or not has_pdl(x.device):
        return None
    shape = x.shape[0], weight.codes_OJ.shape[0], weight.columns
    if x.dtype == torch.bfloat16 and match_of(x.device).hopper and tma_reads(x, weight.codes_OJ):
        tiles = hopper_tiles(*shape, weight.kind, weight.group, weight.zeros_OG is not None, gated, terms)
        if tiles is not None:
            return tiles
    return quantised_tiles(*shape, weight.kind)
