"""Products with weights of 8 and 4 bits: quantised and dense values, and the kernel against float64.

Shapes: M rows, K in, N out.
"""

from itertools import product

import pytest
import torch
from toolkit.kernels import DEVICE
from toolkit.quantised_weights import FORMATS, error, exact, random_weight
from torch import Tensor

from specdec.ops.products.formats.quantised import Kind, dequantise, pack, quantise, row_bytes, unpack, unscaled
from specdec.ops.products.kernels.dense.stream_triton import ARRIVALS
from specdec.ops.products.kernels.quantised.dequantise_triton import launch_dequantise
from specdec.ops.products.kernels.quantised.stream_triton import launch_quantised_linear
from specdec.ops.products.numerics import FAST
from specdec.ops.products.quantised import QuantisedWeight
from specdec.ops.products.tiles.quantised import QuantisedTiles, stream_tiles

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def rand(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def test_quantised_values_are_those_of_their_formats() -> None:
    """Keeps out: a sign, a subnormal or an offset that is read in another way, in any code."""
    every = torch.arange(256, dtype=torch.uint8)
    assert unscaled("int8", every).tolist() == [code - 128 for code in range(256)]
    assert unscaled("int4", every[:16]).tolist() == [code - 8 for code in range(16)]
    assert unscaled("e2m1", every[:16]).tolist() == [*E2M1, *(-number for number in E2M1)]
    for code in (*range(127), *range(128, 255)):
        sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
        number = (mantissa / 8 if exponent == 0 else 1 + mantissa / 8) * 2.0 ** (max(exponent, 1) - 7)
        assert float(unscaled("e4m3", every)[code]) == (-number if sign else number)


@pytest.mark.parametrize("columns", [32, 96, 80, 7])
@pytest.mark.parametrize("kind", ["int4", "e4m3"])
def test_packing_is_undone(kind: Kind, columns: int) -> None:
    """Keeps out: a last run of columns that is cut off, or padding that becomes columns."""
    most = 16 if kind == "int4" else 256
    qvalues = torch.randint(0, most, (3, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    packed = pack(kind, qvalues)
    assert packed.shape == (3, row_bytes(kind, columns)) and torch.equal(unpack(kind, packed, columns), qvalues)


@pytest.mark.parametrize(("kind", "group", "most"), [("e4m3", 0, 0.03), ("int8", 64, 0.01), ("int4", 128, 0.12)])
def test_rounding_to_nearest_is_as_close_as_it_can_be(kind: Kind, group: int, most: float) -> None:
    """Keeps out: scales that waste quantised values or cut dense ones off; the nearest quantised value is taken."""
    weight = rand(8, 256, seed=0)
    weight[3] = 0
    quantised = quantise(weight, kind, group)
    back = dequantise(quantised, torch.float32)
    assert error(back, weight.double()) < most and torch.equal(back[3], weight[3])
    scale = quantised.scales_NG.repeat_interleave(group or 256, 1)[..., None]
    every = (
        unscaled(kind, torch.arange(16 if kind == "int4" else 256, dtype=torch.uint8, device=DEVICE)).nan_to_num(torch.inf)
        * scale
    )
    assert torch.allclose((every - weight[..., None]).abs().amin(-1), (back - weight).abs(), atol=1e-6)


def test_a_product_is_that_of_the_numbers() -> None:
    """The definition, which a CPU runs."""
    x, bias = rand(3, 64, seed=1), torch.arange(48.0, device=DEVICE)
    weight = random_weight("int4", 32, True, 48, 64)
    assert error(QuantisedWeight(weight).matmul(x, bias, FAST), exact(x, weight, False, bias)) < 1e-6
    assert error(QuantisedWeight(weight).gated(x, bias, FAST), exact(x, weight, True, bias)) < 1e-6


@pytest.mark.parametrize(("kind", "group", "zero_points"), FORMATS)
def test_the_kernel_computes_the_product(kind: Kind, group: int, zero_points: bool) -> None:
    """Splits, gated pairs, rows and columns that fill no tile, with and without a bias.

    Keeps out: a scale or a zero of the group before or after, columns of a byte swapped, a tile's rows beyond the weight.
    """
    for gated, splits, K in ((False, 2, 256), (True, 1, 192 if group < 128 else 256)):
        weight = random_weight(kind, group, zero_points, 20, K)
        x = rand(5, K, seed=2)
        bias = rand(20, seed=3) if gated else None
        y = launch_quantised_linear(x, weight, bias, gated, QuantisedTiles("stream_triton", 8, 16, 128, splits, 4, 2))
        assert error(y, exact(x, weight, gated, bias)) < 1e-6, (gated, K)


def test_the_kernel_takes_more_rows_than_a_tile() -> None:
    """Keeps out: rows of the second tile read or stored as the first one's."""
    weight, x = random_weight("int4", 32, False, 20, 64), rand(11, 64, seed=5)
    for gated in (False, True):
        y = launch_quantised_linear(x, weight, None, gated, QuantisedTiles("stream_triton", 8, 16, 64, 1, 4, 2))
        assert error(y, exact(x, weight, gated)) < 1e-6


@pytest.mark.parametrize(("kind", "group", "zero_points"), FORMATS)
def test_the_kernel_dequantises(kind: Kind, group: int, zero_points: bool) -> None:
    """Of rows and columns that fill no block.  Keeps out: columns of a byte swapped, and a number that is rounded twice."""
    weight = random_weight(kind, group, zero_points, 19, 640 if group == 128 else 672)
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(launch_dequantise(weight, dtype), dequantise(weight, dtype))


def test_the_kernel_takes_half_precision() -> None:
    """Keeps out: quantised values converted to another type than x's."""
    weight, x = random_weight("e4m3", 0, False, 32, 128), rand(2, 128, seed=4).half()
    y = launch_quantised_linear(x, weight, None, False, QuantisedTiles("stream_triton", 8, 16, 128, 1, 4, 2))
    assert y.dtype == torch.float16 and error(y, exact(x, weight, False)) < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["e4m3", "int8", "int4"])
def test_a_gpu_rounds_as_a_cpu(kind: Kind) -> None:
    """Of dense values in the middle between two quantised ones.  Keeps out: scales that two devices divide in two ways, so that
    a model rounded on a GPU writes another text than the same model rounded on a CPU.
    """
    draw = torch.Generator().manual_seed(5)
    steps_NK = torch.randint(-24, 25, (64, 256), generator=draw) * 0.5
    steps_NK[:, ::128] = 24 * 0.5
    weight_NK = steps_NK * torch.rand(64, 1, generator=draw)
    on_cpu, on_gpu = quantise(weight_NK, kind, 128), quantise(weight_NK.to(DEVICE), kind, 128)
    assert torch.equal(on_gpu.scales_NG.cpu(), on_cpu.scales_NG) and torch.equal(on_gpu.qweight_NJ.cpu(), on_cpu.qweight_NJ)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "group", "zero_points"), FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_on_a_gpu(kind: Kind, group: int, zero_points: bool, dtype: torch.dtype) -> None:
    """Every number of rows that tiles are chosen for, and more; scales far from 1.  Compared with float64.

    Keeps out: conversion in registers that depends on how a tile's elements lie in them.
    """
    with torch.no_grad():
        for M, (N, K), gated in product((1, 5, 16, 33, 64, 65, 300), ((512, 1024), (320, 2048)), (False, True)):
            weight = random_weight(kind, group, zero_points, N, K)
            x = torch.randn(M, K, device=DEVICE, dtype=dtype)
            stored = QuantisedWeight(weight)
            y = stored.gated(x, None, FAST) if gated else stored.matmul(x, None, FAST)
            assert error(y, exact(x, weight, gated)) < (4e-3 if M <= 64 else 8e-3), (M, N, K, gated)


def test_tiles_fit_the_kernel() -> None:
    """Keeps out: a step that is no part of a group or no whole groups, and tiles that shared memory can't hold."""
    shapes = (6144, 4096), (28672, 4096), (4096, 14336), (64, 96), (128256, 16384)
    for (kind, group, _), M, (N, K) in product(FORMATS, (1, 8, 9, 32, 33, 64), shapes):
        tiles = stream_tiles(M, N, K, kind)
        assert tiles is not None and tiles.block_m >= M and tiles.splits <= -(-K // tiles.block_k)
        assert not group or tiles.block_k % group == 0 or group % tiles.block_k == 0
        assert tiles.splits == 1 or -(-N // (tiles.block_n // 2)) <= ARRIVALS
        shared = tiles.stages * (tiles.block_n * row_bytes(kind, tiles.block_k) + 2 * tiles.block_m * tiles.block_k)
        assert shared <= 220_000
    assert stream_tiles(65, 6144, 4096, "e4m3") is None
