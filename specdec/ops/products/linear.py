"""Products of activations with weights: `linear`, `gated_linear` (SiLU-mul of a fused gate and up) and `silu_mul`.

Each is its definition on a CPU and under autograd.  On a GPU few rows (a decode step, a tree) go through our kernel of
`linear_triton.py`, and up to 192 on wide weights through that of `linear_wide_triton.py`, where they were measured faster
than cuBLAS; cuBLAS takes the rest: `product_tiles` decides.  Knows no model.

Shapes: T rows, I in, O out, F of a gated pair.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.ops.launch import has_pdl, use_kernels

FEW = 64  # rows of x up to which the kernel of linear_triton.py goes; linear_wide_triton.py has the one for more
SMS, WAVE_FULL = 132, 0.8  # of the GPU measured on; the share of them that must have work, over all waves of tiles


class ProductTiles(NamedTuple):
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
    return F.linear(x_TI, weight_OI, bias_O) if tiles is None else _launch(x_TI, weight_OI, bias_O, False, tiles)


def gated_linear(x_TI: Tensor, weight_2FI: Tensor, bias_2F: Tensor | None = None) -> Tensor:
    """silu_mul(linear(x, W, bias)): [T, F].  W's first F rows are the gate's.

    The fused kernel keeps gate and up in float32 until their product, the definition rounds them to x's dtype first: in
    bf16 the two differ by norm(a - b) / norm(a) < 6e-3, the fused one being closer to the exact product.
    """
    tiles = _tiles(x_TI, weight_2FI, gated=True)
    if tiles is None:
        return silu_mul(F.linear(x_TI, weight_2FI, bias_2F))
    return _launch(x_TI, weight_2FI, bias_2F, True, tiles)


def silu_mul(gate_up_T2F: Tensor) -> Tensor:
    """silu(gate) * up, [..., F], of the two halves of the last dim."""
    if use_kernels(gate_up_T2F) and gate_up_T2F.dim() == 2 and gate_up_T2F.stride(1) == 1:
        from specdec.ops.products.linear_triton import launch_silu_mul

        return launch_silu_mul(gate_up_T2F)
    gate, up = gate_up_T2F.chunk(2, dim=-1)
    return F.silu(gate) * up


def _tiles(x: Tensor, weight: Tensor, gated: bool) -> ProductTiles | None:
    """None where the kernel can't go, or was not measured: without chained launches."""
    if not use_kernels(x) or not has_pdl(x.device) or x.dim() != 2 or x.stride(1) != 1:
        return None
    if x.dtype != weight.dtype or not weight.is_contiguous():
        return None
    tiles = product_tiles(x.shape[0], *weight.shape, x.dtype, gated)
    if tiles is None or tiles.shared_bytes(x.element_size()) > _shared_memory(x.device):
        return None
    return tiles if tiles.block_t <= FEW or _tma_reads(x, weight) else None


def _tma_reads(*matrices: Tensor) -> bool:
    """Whether the GPU's copy engine can: rows that start on 16 bytes."""
    return all(m.data_ptr() % 16 == 0 and m.stride(0) * m.element_size() % 16 == 0 for m in matrices)


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, tiles: ProductTiles) -> Tensor:
    if tiles.block_t > FEW:
        from specdec.ops.products.linear_wide_triton import launch_wide_linear

        return launch_wide_linear(x, weight, bias, gated, tiles)
    from specdec.ops.products.linear_triton import launch_linear

    return launch_linear(x, weight, bias, gated, tiles)


@cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have."""
    properties: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack the field
    return properties.shared_memory_per_block_optin


@cache
def product_tiles(T: int, O: int, I: int, dtype: torch.dtype, gated: bool) -> ProductTiles | None:
    """The kernel's tiles for T rows and a weight of O rows, or None: cuBLAS.

    Measured on an H100 in chains of whole layers of the Llama-3.1-8B shape, weights out of memory each time, and on smaller
    shapes with a norm before each product (benchmarks/gemm.py, results/gemm_h100.json).  Bytes in flight count, not
    programs: 64 programs with 100 KiB each under way stream a 4096 x 4096 weight as fast as 256 small ones.  Long rows
    (down, fc) are shared by several programs, so that the fast ones take over from the slow at the end; wide weights
    (gate_up, lm_head) have tiles enough for that.  Beyond 16 rows x itself must come out of L2 for every tile: fewer
    columns a step, taller tiles where there are enough of them.  At 64 rows cuBLAS is faster on qkv and o when products
    follow each other directly, and slower with a norm between, since it can't start early: in a model it never wins.
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
    """More than 64 rows: the kernel of linear_wide_triton.py for a gated pair, up to 128 rows for any wide weight, or None.

    Measured on an H100 behind a norm, in us, cuBLAS (and SiLU-mul) against ours:
                         T = 96           T = 128         T = 192
        gate_up          96.4   88.8    96.1   88.2    103.2   98.8    more than half of it is SiLU-mul's own pass
        lm_head         388.9  372.3   398    379      407    405      192: left to cuBLAS, as is the draft's
        draft lm_head                  109.4   98.9    107.4  105.7
        qkv                             24.5   27.7     25.8   33.4    our best of all tiles and splits: too few tiles for
        o                               18.5   22.9     19.4   27.5    all SMs, and the partial sums of splits, T * O floats
        down                            57.4   56.8     54.9   63.2    each, cost more than splits bring
    Whole layers with their norms, clocks as after 0.3 s of them: 6635 against 6366 at 128 rows, 7275 against 7074 at 192.
    At 192 tiles of 128 weight rows make gate_up's 98.8 to 94.6, but whole layers 7330: x comes out of L2 twice as often.
    Rows beyond T are not free: 72 rows took 98.3 padded to 128, and 87.5 to 96.  160 is not measured with these tiles.
    A program's 200 KiB fill an SM, so tiles go in waves, and a last wave that is mostly empty loses: 19456 x 2560, 192 rows
    and tiles of 128, 58.6 against 52.2.
    """
    if not FEW < T <= (192 if gated else 128) or dtype == torch.float32 or O < 16384:
        return None
    tiles = ProductTiles(96 if T <= 96 else 128, 128, 64, 1, 4, 5)
    if T > 128:
        tiles = ProductTiles(160 if T <= 160 else 192, 256, 64, 1, 8, 4)
    programs = -(-O // tiles.block_o)
    return tiles if programs >= WAVE_FULL * SMS * -(-programs // SMS) else None


def _tiles_float32(T: int, O: int, I: int) -> ProductTiles | None:
    """Without tensor cores the kernel only wins on small weights, the shipped pair's.

    Of more rows than one cuBLAS makes 5.5 to 32 us there, ours 2.5 to 6; on gate_up the two are about even (5 to 8 us).
    """
    if not 1 < T <= 16 or O > 1536 or I > 1024:
        return None
    return ProductTiles(8 if T <= 8 else 16, 16, 32, min(8, -(-I // 32)), 2, 3)
