"""A norm between two products without a launch of its own, against float64.

Shapes: T rows, I in, H hidden, O out.
"""

import pytest
import torch
import torch.nn.functional as F
from toolkit.kernels import DEVICE, HAS_GPU
from torch import Tensor

from specdec.ops.norm import add_rms_norm
from specdec.ops.products.linear import linear
from specdec.ops.products.normed import Product, Reader, Undivided, add_undivided, normed_linear, product_later
from specdec.ops.products.numerics import FAST, INVARIANT

EPS = 1e-5
IS_HOPPER = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)


def rand(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(DEVICE, torch.bfloat16)


def test_on_a_cpu_and_in_one_order_of_sums_nothing_is_put_off() -> None:
    """Keeps out: a product that nobody computes, and rows whose sums depend on tiles in deterministic mode."""
    x, weight = torch.randn(3, 16), torch.randn(8, 16)
    assert product_later(x, weight, None, FAST) is None
    assert product_later(x.bfloat16(), weight.bfloat16(), None, INVARIANT) is None


def test_what_stands_for_tensors_gives_them() -> None:
    """Keeps out: a reader that knows no such norm and gets one without its weight, or of rows that have not been divided."""
    x, weight, bias, norm = torch.randn(3, 16), torch.randn(8, 16), torch.randn(8), torch.rand(8)
    assert torch.equal(Product(x, weight, bias, FAST).tensor(), linear(x, weight, bias))
    total = torch.randn(3, 8)
    undivided = Undivided(total, total * norm, total.square().sum(1)[None], norm, EPS)
    assert torch.equal(undivided.tensor(), F.rms_norm(total, (8,), norm, EPS))
    reader = torch.randn(6, 8)
    assert torch.equal(normed_linear(undivided, reader, None, False, FAST), linear(undivided.tensor(), reader))


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="a kernel for Hopper GPUs")
@pytest.mark.parametrize("T", [1, 2, 5, 8])
@pytest.mark.parametrize(("I", "H", "O"), [(4096, 4096, 28672), (14336, 4096, 6144), (1024, 2088, 4104)])
def test_equals_the_norm_of_the_sum(T: int, I: int, H: int, O: int) -> None:
    """Keeps out: a sum that is rounded once more or once less, squares of rows or columns that don't exist, a row's root mean
    square taken for another one, a bias that is divided, gate and up divided differently; memory that nobody wrote.
    """
    torch.manual_seed(T)
    gated, residual, x = O == 28672, rand(T, H, scale=3.0), rand(T, I)
    weight, bias, norm = rand(H, I, scale=I**-0.5), rand(H), rand(H)
    reader_weight, reader_bias = rand(O, H, scale=H**-0.5), rand(O)
    residual[0] *= 50  # rows of different sizes
    with torch.no_grad():
        delta = product_later(x, weight, bias, FAST)
        assert isinstance(delta, Product)
        torch.empty(1 << 24, device=DEVICE).fill_(float("nan"))  # memory that results may come to lie in
        added = add_undivided(residual, delta, norm, EPS, Reader(reader_weight, gated))
        assert added is not None
        total, undivided = added
        got = normed_linear(undivided, reader_weight, reader_bias, gated, FAST)
        want_total, want_normed = add_rms_norm(residual, delta.tensor(), norm, EPS)
    assert torch.equal(total, want_total)
    torch.testing.assert_close(undivided.tensor(), want_normed, rtol=8e-3, atol=1e-6)  # a bit of bfloat16
    exact = F.linear(F.rms_norm(total.double(), (H,), norm.double(), EPS), reader_weight.double(), reader_bias.double())
    if gated:
        gate, up = exact.chunk(2, -1)
        exact = F.silu(gate) * up
    error = (got.double() - exact).norm(dim=1) / exact.norm(dim=1)
    assert error.max() < 6e-3, error


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="a kernel for Hopper GPUs")
@pytest.mark.parametrize("T", [1, 6])
def test_chained_layers_in_a_graph(T: int) -> None:
    """Keeps out: a product that reads squares or the stream before they are complete, and replays that find old ones."""
    H, I = 4096, 14336
    weights = [(rand(2 * I, H, scale=H**-0.5), rand(H, I, scale=I**-0.5), rand(H)) for _ in range(6)]
    x0 = rand(T, H)

    def forward(deferred: bool) -> Tensor:
        x, normed = x0, F.rms_norm(x0, (H,), None, EPS)
        state: Tensor | Undivided = normed
        for index, (gate_up, down, norm) in enumerate(weights):
            h = normed_linear(state, gate_up, None, True, FAST) if isinstance(state, Undivided) else _gated(state, gate_up)
            delta = product_later(h, down, None, FAST)
            assert delta is not None
            following = weights[index + 1][0] if index + 1 < len(weights) else None
            added = add_undivided(x, delta, norm, EPS, Reader(following, True)) if deferred and following is not None else None
            x, state = added or add_rms_norm(x, delta.tensor(), norm, EPS)
        assert isinstance(state, Tensor)
        return state

    with torch.no_grad():
        want, plain = forward(True), forward(False)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = forward(True)
        for _ in range(20):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, want)
    assert (want.double() - plain.double()).norm() < 2e-2 * plain.double().norm()


def _gated(x: Tensor, gate_up: Tensor) -> Tensor:
    from specdec.ops.products.linear import gated_linear

    return gated_linear(x, gate_up)
