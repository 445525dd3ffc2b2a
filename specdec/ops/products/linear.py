"""Products of activations with weights: `linear`, `gated_linear` (SiLU-mul of a fused gate and up) and `silu_mul`.

On a CPU and under autograd each function runs its definition.  On a GPU, products of few rows (a decode step, a tree) use the
kernel in linear_triton.py, and products of up to 192 rows with wide weights the one in linear_wide_triton.py, for those shapes
for which they were measured to be faster than cuBLAS.  cuBLAS takes the rest.  `product_tiles` decides.  This module knows no
model.

Shapes: T rows, I in, O out, F of a gated pair.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.ops.launch import has_pdl, use_kernels
from specdec.ops.operator import define, use_operator

FEW = 64  # threshold in rows of x: up to this many, linear_triton.py's kernel is used, and linear_wide_triton.py's for more
SMS, WAVE_FULL = 132, 0.8  # SMs of an H100; threshold: the share of SMs that must have work, on average over all waves


class ProductTiles(NamedTuple):
    """What one program of a product kernel works on.

    block_t: rows of x (padded).
    block_o: rows of the weight.
    block_i: columns of a step.
    splits: programs that share a tile's columns.
    warps, stages: Triton's.
    """

    block_t: int
    block_o: int
    block_i: int
    splits: int
    warps: int
    stages: int

    def shared_bytes(self, itemsize: int) -> int:
        """Bytes of shared memory that the pipeline's stages take."""
        return self.stages * (self.block_t + self.block_o) * self.block_i * itemsize


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x W^T + bias: [T, O], summed in float32 and rounded once."""
    if use_operator(x_TI):
        return LINEAR(x_TI, weight_OI, bias_O)
    tiles = _tiles(x_TI, weight_OI, gated=False)
    return F.linear(x_TI, weight_OI, bias_O) if tiles is None else _launch(x_TI, weight_OI, bias_O, False, tiles)


def gated_linear(x_TI: Tensor, weight_2FI: Tensor, bias_2F: Tensor | None = None) -> Tensor:
    """silu_mul(linear(x, W, bias)): [T, F].  The first F rows of W are the gate's, the other F are up's.

    The fused kernel keeps gate and up in float32 until they are multiplied, whereas the definition rounds them to x's dtype
    first.  In bf16 the two differ by norm(a - b) / norm(a) < 6e-3, and the fused result is closer to the exact product.
    """
    if use_operator(x_TI):
        return GATED_LINEAR(x_TI, weight_2FI, bias_2F)
    tiles = _tiles(x_TI, weight_2FI, gated=True)
    if tiles is None:
        return silu_mul(F.linear(x_TI, weight_2FI, bias_2F))
    return _launch(x_TI, weight_2FI, bias_2F, True, tiles)


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """silu(gate) * up: [..., F].  gate and up are the two halves of the last dim."""
    if use_kernels(gate_up_T2F) and gate_up_T2F.dim() == 2 and gate_up_T2F.stride(1) == 1:
        from specdec.ops.products.linear_triton import launch_silu_mul

        return launch_silu_mul(gate_up_T2F)
    gate, up = gate_up_T2F.chunk(2, dim=-1)
    return F.silu(gate) * up


def _tiles(x: Tensor, weight: Tensor, gated: bool) -> ProductTiles | None:
    """The kernel's tiles; None where the kernel can't run, or was not measured because launches can't be chained."""
    if not use_kernels(x) or not has_pdl(x.device) or x.dim() != 2 or x.stride(1) != 1:
        return None
    if x.dtype != weight.dtype or not weight.is_contiguous():
        return None
    tiles = product_tiles(x.shape[0], *weight.shape, x.dtype, gated)
    if tiles is None or tiles.shared_bytes(x.element_size()) > _shared_memory(x.device):
        return None
    return tiles if tiles.block_t <= FEW or _tma_reads(x, weight) else None


def _tma_reads(*matrices: Tensor) -> bool:
    """Whether the GPU's copy engine (TMA) can read these matrices: every row must start at a multiple of 16 bytes."""
    return all(m.data_ptr() % 16 == 0 and m.stride(0) * m.element_size() % 16 == 0 for m in matrices)


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, tiles: ProductTiles) -> Tensor:
    if tiles.block_t > FEW:
        from specdec.ops.products.linear_wide_triton import launch_wide_linear

        return launch_wide_linear(x, weight, bias, gated, tiles)
    from specdec.ops.products.linear_triton import launch_linear

    return launch_linear(x, weight, bias, gated, tiles)


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have."""
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack the field
    return properties.shared_memory_per_block_optin


@cache
def product_tiles(T: int, O: int, I: int, dtype: torch.dtype, gated: bool) -> ProductTiles | None:
    """The kernel's tiles for T rows and a weight of O rows and I columns; None: cuBLAS is used.

    gated: whether the weight holds gate and up rows.
    The choices were measured on an H100: benchmarks/README.md, "Why the tiles and rules are what they are".
    """
    if not 0 < T <= FEW:
        return _tiles_many(T, O, dtype, gated)
    block_t = max(8, 1 << (T - 1).bit_length())
    if dtype == torch.float32:
        return _tiles_float32(T, O, I)
    wide = O >= 16384
    if T <= 16:
        if wide and T <= 8:
            return ProductTiles(block_t, 32, 512, 1, 4, 3)
        if O < 4096:
            return ProductTiles(block_t, 16, 256, -(-I // 4096), 2, 4)
        if wide or I <= 8192:
            return ProductTiles(block_t, 64, 256, 1, 4, 4)
        return ProductTiles(block_t, 64, 128, 4, 4, 6) if T <= 8 else ProductTiles(block_t, 64, 256, 2, 4, 4)
    if wide:
        stages = 4 if T <= 32 else 3
        return ProductTiles(block_t, 64, 128, 1, 4, stages) if gated else ProductTiles(block_t, 128, 128, 1, 8, stages)
    if O < 4096:
        return ProductTiles(block_t, 64, 128, -(-I // 2048), 4, 5)
    splits = -(-I // 8192)
    return ProductTiles(block_t, 64, 128, splits, 4, 7 if -(-O // 64) * splits <= 64 else 5)


def _tiles_many(T: int, O: int, dtype: torch.dtype, gated: bool) -> ProductTiles | None:
    """More than 64 rows: the wide kernel's tiles for a gated pair, and up to 128 rows for any wide weight; None: cuBLAS.

    Measured: benchmarks/README.md, "Why the tiles and rules are what they are".
    """
    if not FEW < T <= (192 if gated else 128) or dtype == torch.float32 or O < 16384:
        return None
    tiles = ProductTiles(96 if T <= 96 else 128, 128, 64, 1, 4, 5)
    if T > 128:
        tiles = ProductTiles(160 if T <= 160 else 192, 256, 64, 1, 8, 4)
    programs = -(-O // tiles.block_o)
    return tiles if programs >= WAVE_FULL * SMS * -(-programs // SMS) else None


def _tiles_float32(T: int, O: int, I: int) -> ProductTiles | None:
    """float32: without tensor cores the kernel is faster than cuBLAS only for small weights, as the shipped pair has them.

    Measured: benchmarks/README.md, "Why the tiles and rules are what they are".
    """
    if not 1 < T <= 16 or O > 1536 or I > 1024:
        return None
    return ProductTiles(8 if T <= 8 else 16, 16, 32, min(8, -(-I // 32)), 2, 3)


def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _gated_linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2)


LINEAR = define("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", linear, _linear_fake)
GATED_LINEAR = define("gated_linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", gated_linear, _gated_linear_fake)
