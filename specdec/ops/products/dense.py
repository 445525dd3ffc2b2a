"""Products of activations with weights: `linear`, `gated_linear` (SiLU-mul of a fused gate and up), and activations alone.

On a CPU and under autograd each function runs its definition.  On a GPU, products of few rows (a decode step, a tree) use the
kernel in stream_triton.py or, on an H200, the one in stream_hopper.py, which also serves some of up to 192 rows that a norm
follows.  There small weights, with up to 512 rows, have registers hold them (one_row_hopper.py, held_rows_hopper.py), or tiles
of stream_hopper.py and tiled_triton.py.  Large-N products of up to 192 rows use the kernel in large_n_triton.py, and gated
large-M products the one in gated_hopper.py, for those shapes for which they were measured to be faster than cuBLAS.  cuBLAS
takes the rest.  The policy decides (numerics.py); under an invariant one no library computes anything.  This module knows no
model.

Shapes: M rows, K in, N out, F of a gated pair, R rows asked for.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.ops.launch import has_pdl, shared_memory, use_kernels
from specdec.ops.operator import define, is_traced, use_operator
from specdec.ops.products.gpus import H100, GpuKind, match_of
from specdec.ops.products.numerics import FAST, Numerics
from specdec.ops.products.partials import Partials
from specdec.ops.products.tiles.dense import FEW, ProductTiles
from specdec.ops.products.tuned.here import tuned_table


def linear(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, numerics: Numerics = FAST) -> Tensor:
    """x W^T + bias: [M, N], summed in float32 and rounded once."""
    if use_operator(x_MK):
        return LINEAR(x_MK, weight_NK, bias_N)
    if numerics.is_invariant:
        return _invariant(x_MK, weight_NK, bias_N, False, numerics)
    tiles = _tiles(x_MK, weight_NK, False, numerics)
    return F.linear(x_MK, weight_NK, bias_N) if tiles is None else _launch(x_MK, weight_NK, bias_N, False, tiles)


def gated_linear(x_MK: Tensor, weight_2FK: Tensor, bias_2F: Tensor | None = None, numerics: Numerics = FAST) -> Tensor:
    """silu_mul(linear(x, W, bias)): [M, F].  The first F rows of W are the gate's, the other F are up's.

    The fused kernel keeps gate and up in float32 until they are multiplied, whereas the definition rounds them to x's dtype
    first.  In bf16 the two differ by norm(a - b) / norm(a) < 6e-3, and the fused result is closer to the exact product.
    """
    if use_operator(x_MK):
        return GATED_LINEAR(x_MK, weight_2FK, bias_2F)
    if numerics.is_invariant:
        return _invariant(x_MK, weight_2FK, bias_2F, True, numerics)
    tiles = _tiles(x_MK, weight_2FK, True, numerics)
    if tiles is None:
        return silu_mul(F.linear(x_MK, weight_2FK, bias_2F))
    return _launch(x_MK, weight_2FK, bias_2F, True, tiles)


class DenseWeight(NamedTuple):
    """A weight whose values are stored as they are (see `Weight`)."""

    values_NK: Tensor

    def matmul(self, x_MK: Tensor, bias_N: Tensor | None, numerics: Numerics, *, partials: bool = False) -> Tensor | Partials:
        """The bias is a part of the first term; `linear` adds it last.  The sum of partials is `linear`, bit for bit, up to FEW
        rows; with more, cuBLAS may compute `linear`.
        """
        if partials and not is_traced(x_MK) and not numerics.is_invariant:
            tiles = _tiles(x_MK, self.values_NK, False, numerics, partials=True)
            if tiles is not None and tiles.kernel == "stream_hopper" and tiles.splits > 1:
                return Partials(_launch(x_MK, self.values_NK, bias_N, False, tiles, partials=True), x_MK.dtype)
        return linear(x_MK, self.values_NK, bias_N, numerics)

    def gated(self, x_MK: Tensor, bias_2F: Tensor | None, numerics: Numerics) -> Tensor:
        return gated_linear(x_MK, self.values_NK, bias_2F, numerics)

    def rows(self, ids_R: Tensor) -> Tensor:
        return self.values_NK[ids_R]

    def read_bytes(self, rows: int, kind: GpuKind | None = None) -> int:
        return self.values_NK.numel() * self.values_NK.element_size()


def with_tiles(x_MK: Tensor, weight_NK: Tensor, gated: bool, tiles: ProductTiles | None) -> Tensor:
    """`linear`, or `gated_linear`, with tiles that the caller chooses; None: through cuBLAS.  For whoever measures tiles."""
    if tiles is not None:
        return _launch(x_MK, weight_NK, None, gated, tiles)
    y_MN = F.linear(x_MK, weight_NK)
    return silu_mul(y_MN) if gated else y_MN


def partials_with_tiles(x_MK: Tensor, weight_NK: Tensor, tiles: ProductTiles) -> Partials:
    """As `with_tiles`, of stream_hopper.py's tiles, before anybody has added up its splits."""
    return Partials(_launch(x_MK, weight_NK, None, False, tiles, partials=True), x_MK.dtype)


def silu_mul(gate_up_M2F: Tensor, times: float = 1.0) -> Tensor:
    """silu(times * gate) * up: [..., F].  gate and up are the two halves of the last dim."""
    if use_kernels(gate_up_M2F) and gate_up_M2F.dim() == 2 and gate_up_M2F.stride(1) == 1:
        from specdec.ops.products.kernels.dense.stream_triton import launch_activation

        return launch_activation(gate_up_M2F, "swiglu", times)
    gate, up = gate_up_M2F.chunk(2, dim=-1)
    return F.silu(gate if times == 1 else gate * times) * up


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, by tanh: [..., F].  gate and up are the two halves of the last dim."""
    if use_kernels(gate_up) and gate_up.dim() == 2 and gate_up.stride(1) == 1:
        from specdec.ops.products.kernels.dense.stream_triton import launch_activation

        return launch_activation(gate_up, "geglu")
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def relu2(x: Tensor) -> Tensor:
    """The square of each number, or 0 where it is below 0: [..., F]."""
    if use_kernels(x) and x.dim() == 2 and x.stride(1) == 1:
        from specdec.ops.products.kernels.dense.stream_triton import launch_activation

        return launch_activation(x, "relu2")
    return F.relu(x).square()


def _tiles(x: Tensor, weight: Tensor, gated: bool, numerics: Numerics, partials: bool = False) -> ProductTiles | None:
    """The kernel's tiles; None where the kernel can't run, or was not measured because launches can't be chained.

    partials: whether the caller, a norm, adds up split-K partials.
    """
    if not use_kernels(x) or not has_pdl(x.device) or x.dim() != 2 or x.stride(1) != 1:
        return None
    if x.dtype != weight.dtype or not weight.is_contiguous():
        return None
    N, K = weight.shape
    match, tma = match_of(x.device), tma_reads(x, weight)
    kind = match.kind if match.hopper and tma else H100  # whose kernels of few rows need no TMA
    tiles = numerics.product_tiles(x.shape[0], N, K, x.dtype, gated, kind, tuned_table(x.device) if tma else None, partials)
    if tiles is None or tiles.shared_bytes(x.element_size()) > shared_memory(x.device):
        return None
    return tiles if tiles.kernel == "stream_triton" or tma else None


def _invariant(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, numerics: Numerics) -> Tensor:
    """The product whose rows do not depend on each other.  It never falls back to a library."""
    assert use_kernels(x) and has_pdl(x.device) and x.dtype == weight.dtype and weight.is_contiguous()
    x_MK = x.reshape(-1, x.shape[-1])
    (M, K), N = x_MK.shape, weight.shape[0]
    tiles = numerics.product_tiles(M, N, K, x.dtype, gated)
    assert tiles is not None and (M <= FEW or tma_reads(weight)), "refused where the decoder is built"
    if x_MK.stride(1) != 1 or not tma_reads(x_MK):
        x_MK = x_MK.contiguous()
    return _launch(x_MK, weight, bias, gated, tiles).unflatten(0, x.shape[:-1])


def tma_reads(*matrices: Tensor) -> bool:
    """Whether TMA can read these matrices: every row must start at a multiple of 16 bytes."""
    return all(m.data_ptr() % 16 == 0 and m.stride(0) * m.element_size() % 16 == 0 for m in matrices)


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool, tiles: ProductTiles, partials: bool = False) -> Tensor:
    """The product by the kernel that the tiles name.  partials: as of stream_hopper.py's `store_partials`."""
    match tiles.kernel:
        case "stream_triton":
            from specdec.ops.products.kernels.dense.stream_triton import launch_linear

            return launch_linear(x, weight, bias, gated, tiles)
        case "large_n_triton":
            from specdec.ops.products.kernels.dense.large_n_triton import launch_large_n_linear

            return launch_large_n_linear(x, weight, bias, gated, tiles)
        case "tiled_triton":
            from specdec.ops.products.kernels.dense.tiled_triton import launch_tiled_linear

            return launch_tiled_linear(x, weight, bias, gated, tiles)
        case "stream_hopper":
            from specdec.ops.products.kernels.dense.stream_hopper import launch_hopper_linear

            return launch_hopper_linear(x, weight, bias, gated, tiles, partials)
        case "one_row_hopper":
            from specdec.ops.products.kernels.dense.one_row_hopper import launch_one_row

            return launch_one_row(x, weight, bias, gated, tiles)
        case "held_rows_hopper":
            from specdec.ops.products.kernels.dense.held_rows_hopper import launch_held_rows

            return launch_held_rows(x, weight, bias, gated, tiles)
        case "gated_hopper":
            from specdec.ops.products.kernels.dense.gated_hopper import launch_gated_hopper

            assert gated
            return launch_gated_hopper(x, weight, bias, tiles, _sms(x.device))


@cache
def _sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _gated_linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2)


LINEAR = define("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", linear, _linear_fake)
GATED_LINEAR = define("gated_linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor", gated_linear, _gated_linear_fake)
