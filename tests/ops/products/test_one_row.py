"""Products of few rows with small weights that registers hold: the kernels against float64, and who takes them.

Shapes: N out, K in, B matrices of a stack.
"""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from toolkit.kernels import DEVICE, HAS_GPU
from torch import Tensor

from specdec.ops.products.dense import gated_linear, linear, with_tiles
from specdec.ops.products.gpus import H100, H200
from specdec.ops.products.tiles.dense import (
    HELD_NUMBERS,
    HELD_ROWS,
    MOST_WORDS,
    TILED_ABOVE,
    ProductTiles,
    product_tiles,
)

NAN = float("nan")
DTYPES = [torch.bfloat16, torch.float16]
hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_GPU or torch.cuda.get_device_capability() != (9, 0), reason="kernels for Hopper GPUs"),
]
SHAPES = ((960, 576), (576, 1536), (1344, 2048), (5120, 768), (520, 1096), (72, 264), (8, 8))


def on_hopper(test: object) -> object:
    for mark in hopper:
        test = mark(test)
    return test


def rand(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Inside of a larger tensor that is NaN elsewhere: whatever is read beyond a row, or beyond the last one, shows."""
    room = torch.full((shape[0] + 1, *shape[1:-1], shape[-1] + 8), NAN).to(DEVICE, dtype)
    room[: shape[0], ..., : shape[-1]] = torch.randn(*shape).to(DEVICE, dtype)
    return room[: shape[0], ..., : shape[-1]]


def close(got: Tensor, want: Tensor) -> None:
    assert float((got.double() - want).norm() / want.norm()) < (1e-3 if got.dtype == torch.float16 else 6e-3)


@on_hopper
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "block_k", "warps"), [(16, 64, 4), (16, 128, 8), (8, 256, 4)])
def test_a_row_equals_the_definition(rows: int, block_k: int, warps: int, gated: bool, dtype: torch.dtype) -> None:
    """Keeps out: columns beyond the last one, and rows; gate and up swapped; a bias of another row."""
    tiles = ProductTiles("one_row_hopper", 1, rows, block_k, 1, warps, 1)
    for N, K in SHAPES:
        x, weight = rand(1, K, dtype=dtype), rand(N, K, dtype=dtype).contiguous()
        bias = torch.randn(N).to(DEVICE, dtype)
        with torch.inference_mode():
            got, biased = with_tiles(x, weight, gated, tiles), (gated_linear if gated else linear)(x, weight, bias)
        want, want_biased = F.linear(x.double(), weight.double()), F.linear(x.double(), weight.double(), bias.double())
        if gated:
            want, want_biased = (F.silu(a) * b for a, b in (each.chunk(2, -1) for each in (want, want_biased)))
        close(got, want)
        close(biased, want_biased)


@on_hopper
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("M", [17, 48, 97, 161, 192, 193, 500])
def test_trees_of_rows_equal_the_definition(M: int, gated: bool, dtype: torch.dtype) -> None:
    """Keeps out: rows of x that no tile has, or two; tiles that an SM can't hold; a bias of another row."""
    for N, K in ((960, 576), (576, 576), (3072, 576), (576, 1536), (1344, 1536), (1040, 40)):
        x, weight, bias = rand(M, K, dtype=dtype), rand(N, K, dtype=dtype).contiguous(), torch.randn(N).to(DEVICE, dtype)
        assert (product_tiles(M, N, K, dtype, gated, H200) is None) == (M > TILED_ABOVE and N <= HELD_ROWS)
        with torch.inference_mode():
            got = (gated_linear if gated else linear)(x, weight, bias)
        want = F.linear(x.double(), weight.double(), bias.double())
        if gated:
            gate, up = want.chunk(2, -1)
            want = F.silu(gate) * up
        close(got, want)


@on_hopper
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("block_m", "block_n", "warps"), [(8, 16, 4), (16, 16, 8), (16, 32, 4), (32, 16, 4)])
def test_few_rows_equal_the_definition(block_m: int, block_n: int, warps: int, gated: bool, dtype: torch.dtype) -> None:
    """Keeps out: columns in another order than x's; columns and rows beyond the last one; gate and up swapped; tiles of x that
    overlap."""
    tiles = ProductTiles("held_rows_hopper", block_m, block_n, 32, 1, warps, 1)
    for N, K in SHAPES:
        for M in (1, block_m - 3, block_m, 5 * block_m - 3):
            x, weight = rand(M, K, dtype=dtype), rand(N, K, dtype=dtype).contiguous()
            with torch.inference_mode():
                got = with_tiles(x, weight, gated, tiles)
            want = F.linear(x.double(), weight.double())
            if gated:
                gate, up = want.chunk(2, -1)
                want = F.silu(gate) * up
            close(got, want)


def test_who_takes_few_rows_of_small_weights() -> None:
    """Keeps out: more rows of x than were measured, large weights, float32, and kernels that lost there."""
    for N, K, gated in ((960, 576, False), (576, 576, False), (3072, 576, True), (576, 1536, False), (49152, 576, False)):
        for M, dtype, kind in itertools.product((1, 2, 8, 16, 17, 192, 193), (torch.bfloat16, torch.float32), (H200, H100)):
            tiles = product_tiles(M, N, K, dtype, gated, kind)
            held = tiles is not None and tiles.kernel in ("one_row_hopper", "held_rows_hopper")
            small = M <= 8 or (N * K <= HELD_NUMBERS and (M <= 16 or (M <= TILED_ABOVE and N <= HELD_ROWS)))
            assert held == (small and dtype == torch.bfloat16 and kind == H200), (M, N, K)
    for N, K, gated in ((4096, 4096, False), (5632, 1024, True), (5120, 768, False), (1344, 2048, False)):
        large = product_tiles(1, N, K, torch.bfloat16, gated, H200)
        assert large is not None and large.kernel == "stream_hopper"


def test_registers_hold_a_program_s_part_of_a_weight() -> None:
    """Keeps out: tiles by which a thread would keep its weights in memory; rows that no lane has."""
    for N, K, gated in itertools.product(
        (8, 64, 576, 960, 1344, 3072, 5120), (8, 192, 576, 768, 1536, 2048, 4096, 8192), (False, True)
    ):  # fmt: skip
        for M in (1, 4, 16):
            tiles, parts = product_tiles(M, 2 * N if gated else N, K, torch.bfloat16, gated, H200), 2 if gated else 1
            if tiles is not None and tiles.kernel == "one_row_hopper":
                rows = tiles.block_n * tiles.block_k // (tiles.warps * 256)
                assert rows * tiles.warps * 256 == tiles.block_n * tiles.block_k
                assert rows * -(-K // tiles.block_k) * 4 * parts <= MOST_WORDS
            if tiles is not None and tiles.kernel == "held_rows_hopper":
                assert tiles.block_n % 16 == 0 and -(-K // 32 // tiles.warps) * tiles.block_n // 2 <= MOST_WORDS
