"""Products of activations with weights: `linear`, `gated_linear` (SiLU-mul of a fused gate and up) and `silu_mul`.

On a CPU and under autograd each function runs its definition.  On a GPU, products of few rows (a decode step, a tree) use the
kernel in stream_triton.py or, on an H200, the one in stream_hopper.py, which also serves some of up to 192 rows that a norm
follows.  Products of up to 192 rows with wide weights use the one in wide_triton.py, and gated products of many rows the
one in gated_hopper.py, for those shapes for which they were measured to be faster than cuBLAS.  cuBLAS takes the rest.  The
policy decides (numerics.py); under an invariant one no library computes anything.  This module knows no model.

Shapes: T rows, I in, O out, F of a gated pair.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.ops.launch import has_pdl, use_kernels
from specdec.ops.operator import define, is_traced, use_operator
from specdec.ops.products.gpus import H100, match_of
from specdec.ops.products.numerics import FAST, Numerics
from specdec.ops.products.terms import Terms
from specdec.ops.products.tiles.dense import FEW, ProductTiles
from specdec.ops.products.tuned.here import tuned_table


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, numerics: Numerics = FAST) -> Tensor:
    """x W^T + bias: [T, O], summed in float32 and rounded once."""
    if use_operator(x_TI):
        return LINEAR(x_TI, weight_OI, bias_O)
    if numerics.is_invariant:
        return _invariant(x_TI, weight_OI, bias_O, False, numerics)
    tiles = _tiles(x_TI, weight_OI, False, numerics)
    return F.linear(x_TI, weight_OI, bias_O) if tiles is None else _launch(x_TI, weight_OI, bias_O, False, tiles)


def linear_terms(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, numerics: Numerics = FAST) -> Tensor | Terms:
    """`linear`, or the terms of programs that share columns: adding them up in the product's kernel would be one more wait.

    The bias is a part of the first term; `linear` adds it last.  Their sum is `linear`, bit for bit, up to FEW rows; with more,
    cuBLAS may compute `linear`.
    """
    if not is_traced(x_TI) and not numerics.is_invariant:
        tiles = _tiles(x_TI, weight_OI, False, numerics, terms=True)
        if tiles is not None and tiles.lag >= 0 and tiles.splits > 1:
            from specdec.ops.products.kernels.dense.stream_hopper import launch_hopper_linear

            return Terms(launch_hopper_linear(x_TI, weight_OI, bias_O, False, tiles, leaves=True), x_TI.dtype)
    return linear(x_TI, weight_OI, bias_O, numerics)


def gated_linear(x_TI: Tensor, weight_2FI: Tensor, bias_2F: Tensor | None = None, numerics: Numerics = FAST) -> Tensor:
    """silu_mul(linear(x, W, bias)): [T, F].  The first F rows of W are the gate's, the other F are up's.

    The fused kernel keeps gate and up in float32 until they are multiplied, whereas the definition rounds them to x's dtype
    first.  In bf16 the two differ by norm(a - b) / norm(a) < 6e-3, and the fused result is closer to the exact product.
    """
    if use_operator(x_TI):
        return GATED_LINEAR(x_TI, weight_2FI, bias_2F)
    if numerics.is_invariant:
        return _invariant(x_TI, weight_2FI, bias_2F, True, numerics)
    tiles = _tiles(x_TI, weight_2FI, True, numerics)
    if tiles is None:
        return silu_mul(F.linear(x_TI, weight_2FI, bias_2F))
    return _launch(x_TI, weight_2FI, bias_2F, True, tiles)


def with_tiles(x_TI: Tensor, weight_OI: Tensor, gated: bool, tiles: ProductTiles | None) -> Tensor:
    """`linear`, or `gated_linear`, with tiles that the caller chooses; None: through cuBLAS.  For whoever measures tiles."""
    if tiles is not None:
        return _launch(x_TI, weight_OI, None, gated, tiles)
    y_TO = F.linear(x_TI, weight_OI)
    return silu_mul(y_TO) if gated else y_TO


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """silu(gate) * up: [..., F].  gate and up are the two halves of the last dim."""
    if use_kernels(gate_up_T2F) and gate_up_T2F.dim() == 2 and gate_up_T2F.stride(1) == 1:
        from specdec.ops.products.kernels.dense.stream_triton import launch_silu_mul

        return launch_silu_mul(gate_up_T2F)
    gate, up = gate_up_T2F.chunk(2, dim=-1)
    return F.silu(gate) * up


def _tiles(x: Tensor, weight: Tensor, gated: bool, numerics: Numerics, terms: bool = False) -> ProductTiles | None:
    """The kernel's tiles; None where the kernel can't run, or was not measured because launches can't be chained.

    terms: whether a norm may add up what splits have computed.
    """
    if not use_kernels(x) or not has_pdl(x.device) or x.dim() != 2 or x.stride(1) != 1:
        return None
    if x.dtype != weight.dtype or not weight.is_contiguous():
        return None
    O, I = weight.shape
    match, tma = match_of(x.device), tma_reads(x, weight)
    kind = match.kind if match.hopper and tma else H100  # whose kernels of few rows need no TMA
    tiles = numerics.product_tiles(x.shape[0], O, I, x.dtype, gated, kind, tuned_table(x.device) if tma else None, terms)
    if tiles is None or tiles.shared_bytes(x.element_size()) > _shared_memory(x.device):
        return None
    return tiles if tiles.block_t <= FEW or tma_reads(x, weight) else None


def _invariant(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, numerics: Numerics) -> Tensor:
    """The product whose rows do not depend on each other.  It never falls back to a library."""
    assert use_kernels(x) and has_pdl(x.device) and x.dtype == weight.dtype and weight.is_contiguous()
    x_TI = x.reshape(-1, x.shape[-1])
    (T, I), O = x_TI.shape, weight.shape[0]
    tiles = numerics.product_tiles(T, O, I, x.dtype, gated)
    assert tiles is not None and (T <= FEW or tma_reads(weight)), "refused where the decoder is built"
    if x_TI.stride(1) != 1 or not tma_reads(x_TI):
        x_TI = x_TI.contiguous()
    return _launch(x_TI, weight, bias, gated, tiles).unflatten(0, x.shape[:-1])


def tma_reads(*matrices: Tensor) -> bool:
    """Whether the GPU's copy engine (TMA) can read these matrices: every row must start at a multiple of 16 bytes."""
    return all(m.data_ptr() % 16 == 0 and m.stride(0) * m.element_size() % 16 == 0 for m in matrices)


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, tiles: ProductTiles) -> Tensor:
    if tiles.fetchers:
        from specdec.ops.products.kernels.dense.gated_hopper import launch_gated_hopper

        assert gated
        return launch_gated_hopper(x, weight, bias, tiles, _sms(x.device))
    if tiles.lag >= 0:
        from specdec.ops.products.kernels.dense.stream_hopper import launch_hopper_linear

        return launch_hopper_linear(x, weight, bias, gated, tiles)
    if tiles.columns:
        from specdec.ops.products.kernels.dense.tiled_triton import launch_tiled_linear

        return launch_tiled_linear(x, weight, bias, gated, tiles)
    if tiles.block_t > FEW:
        from specdec.ops.products.kernels.dense.wide_triton import launch_wide_linear

        return launch_wide_linear(x, weight, bias, gated, tiles)
    from specdec.ops.products.kernels.dense.stream_triton import launch_linear

    return launch_linear(x, weight, bias, gated, tiles)


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have."""
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack the field
    return properties.shared_memory_per_block_optin


@cache
def _sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _gated_linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2)


LINEAR = define("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", linear, _linear_fake)
GATED_LINEAR = define("gated_linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", gated_linear, _gated_linear_fake)
