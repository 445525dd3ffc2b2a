"""Products in one order of sums: a row's result does not depend on how many rows are multiplied together.

Shapes: M rows, K in, N out.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from toolkit.kernels import DEVICE, HAS_GPU

from specdec.models.linear import Linear, use_numerics
from specdec.ops.products.dense import silu_mul
from specdec.ops.products.gpus import H200
from specdec.ops.products.kernels.dense.stream_triton import ARRIVALS
from specdec.ops.products.kernels.dense.tiled_triton import launch_tiled_linear
from specdec.ops.products.numerics import FAST, INVARIANT
from specdec.ops.products.tiles.dense import FEW, STEP, ProductTiles, invariant_tiles

DTYPE = torch.bfloat16 if HAS_GPU else torch.float16
LARGE = [(6144, 4096, False), (4096, 4096, False), (4096, 14336, False), (28672, 4096, True), (32768, 4096, False)]
SMALL = [(576, 192, False), (192, 512, False), (1024, 3000, False), (2048, 1408, True)]
ROWS = (1, 2, 6, 8, 9, 16, 17, 32, 33, 60, 64, 65, 100, 128, 129, 192, 200, 256, 384, 1000, 5000)


@pytest.mark.parametrize(
    ("M", "N", "K", "splits", "gated"), [(35, 40, 104, 1, False), (19, 40, 328, 2, True), (3, 70, 72, 1, True)]
)
def test_the_tiled_product_equals_the_definition(M: int, N: int, K: int, splits: int, gated: bool) -> None:
    """Keeps out: tiles of rows swapped, a split left out or counted twice, stores beyond M or N, a bias per split."""
    x, bias = torch.randn(M, K).to(DEVICE, DTYPE), torch.randn(2 * N if gated else N).to(DEVICE, DTYPE)
    weight = torch.randn(2 * N if gated else N, K).to(DEVICE, DTYPE)
    tiles = ProductTiles("tiled_triton", 16, 128 if HAS_GPU else 32, 64, splits, 4, 3)
    for b in (bias, None):
        want = F.linear(x.double(), weight.double(), None if b is None else b.double())
        want = silu_mul(want) if gated else want
        got = launch_tiled_linear(x, weight, b, gated, tiles)
        assert got.shape == want.shape and (got.double() - want).norm() < 6e-3 * want.norm()


@pytest.mark.parametrize(("N", "K", "gated"), LARGE + SMALL)
def test_columns_are_cut_alike_for_all_rows(N: int, K: int, gated: bool) -> None:
    """Keeps out: a number of rows at which columns are split elsewhere, or at which a smaller instruction multiplies."""
    cuts = set()
    for M in ROWS:
        tiles = invariant_tiles(M, N, K, gated)
        step = tiles.block_k if tiles.kernel == "stream_triton" else STEP
        steps = -(-K // step)
        cuts.add((tiles.splits, 0 if tiles.splits == 1 else -(-steps // tiles.splits) * step))
        most = tiles.block_n if tiles.kernel == "stream_triton" else 2 * tiles.block_n
        assert tiles.warps % 4 == 0 and most >= 64 and tiles.block_m >= 16
        assert tiles.shared_bytes(2) <= 227 * 1024
        assert tiles.splits == 1 or M > FEW or -(-N // tiles.block_n) <= ARRIVALS
    assert len(cuts) == 1


def test_narrow_weights_have_a_program_for_every_sm() -> None:
    """Keeps out: trees of many rows that leave half of the GPU without work."""
    for K in (4096, 14336):
        assert -(-4096 // 128) * -(-256 // invariant_tiles(256, 4096, K, False).block_m) == 128
    assert invariant_tiles(256, 6144, 4096, False).block_m == 128


def test_heads_a_program_and_the_switch() -> None:
    """Keeps out: a norm of heads reduced by other threads in long prompts, matrices that were left out of the policy."""
    assert {INVARIANT.heads_a_program(tokens, 48) for tokens in ROWS} == {8}
    assert {FAST.heads_a_program(tokens, 48) for tokens in ROWS} == {8, 64}
    model = torch.nn.Sequential(Linear(4, 4), torch.nn.Sequential(Linear(4, 8)))
    use_numerics(model, INVARIANT)
    assert all(each.numerics is INVARIANT for each in model.modules() if isinstance(each, Linear))


def test_weights_in_12_bits_are_not_read() -> None:
    """Keeps out: a kernel whose tiles add up in an order that depends on the rows."""
    shapes = [(M, *weight, False, H200) for M in (1, 16, 64) for weight in ((4096, 4096), (28672, 4096))]
    assert any(FAST.lossless_tiles(*shape) for shape in shapes)
    assert not any(INVARIANT.lossless_tiles(*shape) for shape in shapes)


def test_matrices_take_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a library's product under the invariant policy, rows of more than two dims or strided ones refused."""
    for switch in ("use_kernels", "has_pdl"):
        monkeypatch.setattr(f"specdec.ops.products.dense.{switch}", lambda _: True)
    monkeypatch.setattr(F, "linear", None)  # whoever calls it fails
    linear = Linear(72, 48, bias=True).to(DEVICE, DTYPE).requires_grad_(False)
    use_numerics(linear, INVARIANT)
    for parameter in linear.parameters():
        parameter.normal_()
    x = torch.randn(70, 2, 75).to(DEVICE, DTYPE)[..., 1:73]
    whole, exact = linear(x), x.double() @ linear.weight.double().T + linear.bias.double()  # type: ignore[union-attr]
    few = linear(x[:1])
    assert whole.shape == (70, 2, 48) and few.shape == (1, 2, 48)
    for got, want in ((whole, exact), (few, exact[:1])):
        assert (got.double() - want).norm() < 6e-3 * want.norm()


@pytest.mark.gpu
@pytest.mark.parametrize(("N", "K", "gated"), LARGE + SMALL)
def test_rows_do_not_depend_on_each_other(N: int, K: int, gated: bool) -> None:
    """Keeps out: tiles whose instruction adds up columns in another order than the other tiles' one."""
    linear = Linear(K, N, bias=not gated).to(DEVICE, DTYPE).requires_grad_(False)
    linear.numerics = INVARIANT
    for parameter in linear.parameters():
        parameter.normal_(std=0.05)
    x = torch.randn(1000, K).to(DEVICE, DTYPE)
    with torch.inference_mode():
        run = linear.gated if gated else linear
        whole = run(x)
        for M in ROWS:
            start = 1000 - M if M < 1000 else 0
            assert torch.equal(run(x[start : start + M]), whole[start : start + M]), M
