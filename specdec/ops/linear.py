"""Products of activations with weights: `linear`, `gated_linear` (SiLU-mul of a fused gate and up) and `silu_mul`.

Each is its definition on a CPU and under autograd.  On a GPU few rows (a decode step, a tree) go through our kernel of
`linear_triton.py` where it was measured faster than cuBLAS, and cuBLAS takes the rest: `tiles_for` decides.  Knows no model.

Shapes: T rows, I in, O out, F of a gated pair.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.ops.launch import has_pdl, use_kernels


class Tiles(NamedTuple):
    """What one program of the kernel works on: rows of x (padded), rows of the weight, columns a step; and how.

    splits: programs that share a tile's columns; warps and stages are Triton's.
    """

    block_t: int
    block_o: int
    block_i: int
    splits: int
    warps: int
    stages: int

    def shared_bytes(self, itemsize: int) -> int:
        return self.stages * (self.block_t + self.block_o) * self.block_i * itemsize


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """x W^T + bias: [T, O], summed in float32 and rounded once."""
    tiles = _tiles(x_TI, weight_OI, gated=False)
    if tiles is None:
        return F.linear(x_TI, weight_OI, bias_O)
    from specdec.ops.linear_triton import launch_linear

    return launch_linear(x_TI, weight_OI, bias_O, False, tiles)


def gated_linear(x_TI: Tensor, weight_2FI: Tensor, bias_2F: Tensor | None = None) -> Tensor:
    """silu_mul(linear(x, W, bias)): [T, F].  W's first F rows are the gate's.

    The fused kernel keeps gate and up in float32 until their product, the definition rounds them to x's dtype first: in
    bf16 the two differ by norm(a - b) / norm(a) < 6e-3, the fused one being closer to the exact product.
    """
    tiles = _tiles(x_TI, weight_2FI, gated=True)
    if tiles is None:
        return silu_mul(F.linear(x_TI, weight_2FI, bias_2F))
    from specdec.ops.linear_triton import launch_linear

    return launch_linear(x_TI, weight_2FI, bias_2F, True, tiles)


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """silu(gate) * up, [..., F], of the two halves of the last dim."""
    if use_kernels(gate_up_T2F) and gate_up_T2F.dim() == 2 and gate_up_T2F.stride(1) == 1:
        from specdec.ops.linear_triton import launch_silu_mul

        return launch_silu_mul(gate_up_T2F)
    gate, up = gate_up_T2F.chunk(2, dim=-1)
    return F.silu(gate) * up


def _tiles(x: Tensor, weight: Tensor, gated: bool) -> Tiles | None:
    """None where the kernel can't go, or was not measured: without chained launches."""
    if not use_kernels(x) or not has_pdl(x.device) or x.dim() != 2 or x.stride(1) != 1:
        return None
    if x.dtype != weight.dtype or not weight.is_contiguous():
        return None
    tiles = tiles_for(x.shape[0], *weight.shape, x.dtype, gated)
    fits = tiles is not None and tiles.shared_bytes(x.element_size()) <= _shared_memory(x.device)
    return tiles if fits else None


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have."""
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack the field
    return properties.shared_memory_per_block_optin


@cache
def tiles_for(T: int, O: int, I: int, dtype: torch.dtype, gated: bool) -> Tiles | None:
    """The kernel's tiles for T rows and a weight of O rows, or None: cuBLAS.

    Measured on an H100 in chains of whole layers of the Llama-3.1-8B shape, weights out of memory each time, and on smaller
    shapes with a norm before each product (benchmarks/gemm.py, results/gemm_h100.json).  Bytes in flight count, not
    programs: 64 programs with 100 KiB each under way stream a 4096 x 4096 weight as fast as 256 small ones.  Long rows
    (down, fc) are shared by several programs, so that the fast ones take over from the slow at the end; wide weights
    (gate_up, lm_head) have tiles enough for that.  Beyond 16 rows x itself must come out of L2 for every tile: fewer
    columns a step, taller tiles where there are enough of them.  At 64 rows cuBLAS is faster on qkv and o when products
    follow each other directly, and slower with a norm between, since it can't start early: in a model it never wins.
    """
    if not 0 < T <= 64:
        return None
    block_t = max(8, 1 << (T - 1).bit_length())
    if dtype == torch.float32:
        return _tiles_float32(T, O, I)
    wide = O >= 16384
    if T <= 16:
        if wide and T <= 8:
            return Tiles(block_t, 32, 512, 1, 4, 3)
        if O < 4096:
            return Tiles(block_t, 16, 256, -(-I // 4096), 2, 4)
        if wide or I <= 8192:
            return Tiles(block_t, 64, 256, 1, 4, 4)
        return Tiles(block_t, 64, 128, 4, 4, 6) if T <= 8 else Tiles(block_t, 64, 256, 2, 4, 4)
    if wide:
        stages = 4 if T <= 32 else 3
        return Tiles(block_t, 64, 128, 1, 4, stages) if gated else Tiles(block_t, 128, 128, 1, 8, stages)
    if O < 4096:
        return Tiles(block_t, 64, 128, -(-I // 2048), 4, 5)
    splits = -(-I // 8192)
    return Tiles(block_t, 64, 128, splits, 4, 7 if -(-O // 64) * splits <= 64 else 5)


def _tiles_float32(T: int, O: int, I: int) -> Tiles | None:
    """Without tensor cores the kernel only wins on small weights, the shipped pair's.

    Of more rows than one cuBLAS makes 5.5 to 32 us there, ours 2.5 to 6; on gate_up the two are about even (5 to 8 us).
    """
    if not 1 < T <= 16 or O > 1536 or I > 1024:
        return None
    return Tiles(8 if T <= 8 else 16, 16, 32, min(8, -(-I // 32)), 2, 3)
