"""A product whose partials the norm after it adds up.

Shapes: M rows, K in, H hidden, S partials.
"""

import pytest
import torch
import torch.nn.functional as F
from toolkit.inside.captures import capturing
from toolkit.kernels import DEVICE, HAS_GPU
from torch import Tensor

from specdec.attention.inputs import HeadInputs
from specdec.attention.kinds import Scoring
from specdec.models.causal_lm import DecoderLayer
from specdec.models.checkpoints.loader import build
from specdec.models.config import ModelConfig, RopeConfig
from specdec.ops.norm import add_normed, add_rms_norm
from specdec.ops.norm_triton import launch_add_normed, launch_add_rms_norm
from specdec.ops.products.dense import DenseWeight, linear
from specdec.ops.products.gpus import H200, GpuMatch
from specdec.ops.products.numerics import FAST, INVARIANT
from specdec.ops.products.partials import Delta, NormedProduct, Partials, TwoProducts, added_up, multiplied
from specdec.ops.rope import Rotation

EPS = 1e-5
IS_HOPPER = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)


@pytest.fixture(autouse=True)
def _tiles_of_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """By them programs share columns.  Every Hopper GPU can run them, and none takes tiles that were kept on this machine."""
    monkeypatch.setattr("specdec.ops.products.dense.match_of", lambda device: GpuMatch(H200, "the tests ask for them", True))
    monkeypatch.setattr("specdec.ops.products.dense.tuned_table", lambda device: None)


def rand(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype)


class Whole(torch.nn.Module):
    """A matrix that leaves no partials."""

    def __init__(self, matrix: torch.nn.Module) -> None:
        super().__init__()
        self.matrix = matrix

    def forward(self, x: Tensor, partials: bool = False) -> Tensor:
        return self.matrix(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("S", "H"), [(1, 300), (2, 300), (4, 300), (5, 300), (16, 1100)])
def test_the_norm_adds_partials_up(S: int, H: int) -> None:
    """Keeps out: a partial left out or read from another row's place, a sum that is rounded less often than the product is."""
    M = 5
    x, weight = rand(M, H, dtype=torch.float16), rand(H, dtype=torch.float16)
    partials = Partials(rand(S, M, H, dtype=torch.float32), torch.float16)
    got = launch_add_rms_norm(x, partials, weight, EPS)
    want = launch_add_rms_norm(x, partials.tensor(), weight, EPS)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    defined = add_rms_norm(x.double(), Partials(partials.sums_SMN.double(), torch.float64), weight.double(), EPS)
    torch.testing.assert_close(got[1].double(), defined[1], atol=4e-3, rtol=4e-3)


def product_of(S: int, M: int, H: int, times: float) -> Tensor | Partials:
    """Random partials, or a product whose rows are strided, perhaps multiplied."""
    whole = rand(M, H + 8, dtype=torch.float16)[:, 8:]
    product = whole if S == 1 else Partials(rand(S, M, H, dtype=torch.float32), torch.float16)
    return multiplied(product, times)


@pytest.mark.parametrize(("S", "times"), [(1, 0.22), (2, 0.22), (5, 3.3), (1, 1.0)])
@pytest.mark.parametrize("second", [None, (1, 0.9), (3, 0.7)])
def test_the_norm_multiplies_what_it_adds(S: int, times: float, second: tuple[int, float] | None) -> None:
    """Keeps out: a multiplier of the other product or of the residual stream, one that meets a sum before it is rounded, the
    partials of one product counted by the other's; a norm of the sum where the delta is to be normed.
    """
    M, H = 5, 300
    x, weight = rand(M, H, dtype=torch.float16), rand(H, dtype=torch.float16)
    first = product_of(S, M, H, times)
    delta: Delta = first if second is None else TwoProducts(first, product_of(second[0], M, H, second[1]))
    whole = added_up(delta)
    total, normed = launch_add_rms_norm(x, delta, weight, EPS)
    assert torch.equal(total, x + whole) and torch.equal(normed, launch_add_rms_norm(x, whole, weight, EPS)[1])
    assert torch.equal(launch_add_normed(x, delta, None, EPS), x + whole)
    after = launch_add_normed(x, delta, weight, EPS)
    torch.testing.assert_close(after, x + F.rms_norm(whole, (H,), weight, EPS), atol=4e-3, rtol=4e-3)
    torch.testing.assert_close(
        after.double(), add_normed(x.double(), whole.double(), weight.double(), EPS), atol=8e-3, rtol=8e-3
    )


@pytest.mark.parametrize("S", [1, 2, 5])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_a_norm_adds_what_another_norm_gives(S: int, scale: float | None) -> None:
    """Keeps out: one norm's weight or epsilon taken for the other's, partials that are normed one by one, and a multiplier of
    the product alone, where it is that of its sum with the residual stream.
    """
    M, H, inner_eps = 5, 300, 0.5
    x, weight, inner = rand(M, H, dtype=torch.float16), rand(H, dtype=torch.float16), rand(H, dtype=torch.float16)
    scale_1 = None if scale is None else torch.tensor([scale], dtype=torch.float16, device=x.device)
    product, memory = product_of(S, M, H, 1.0), x.new_empty(M, 2 * H)[:, H:]
    total, normed = launch_add_rms_norm(x, NormedProduct(product, inner, inner_eps, scale_1), weight, EPS, out_TH=memory)
    exact = added_up(product).double()
    wide = NormedProduct(exact, inner.double(), inner_eps, None if scale_1 is None else scale_1.double())
    want = add_rms_norm(x.double(), wide, weight.double(), EPS)
    by_hand = x.double() + exact / (exact.square().mean(-1, keepdim=True) + inner_eps).sqrt() * inner.double()
    torch.testing.assert_close(want[0], by_hand * (1.0 if scale_1 is None else scale_1.double()))
    assert total.data_ptr() == memory.data_ptr()
    torch.testing.assert_close(total.double(), want[0], atol=8e-3, rtol=8e-3)
    torch.testing.assert_close(normed.double(), want[1], atol=2e-2, rtol=2e-2)


def test_on_a_cpu_and_in_one_order_of_sums_there_are_no_partials() -> None:
    """Keeps out: partials whose number follows from tiles, in deterministic mode."""
    x, weight = torch.randn(3, 16), torch.randn(8, 16)
    assert torch.equal(added_up(DenseWeight(weight).matmul(x, None, FAST, partials=True)), linear(x, weight))
    if IS_HOPPER:
        x, weight = rand(3, 4096), rand(4096, 4096)
        with torch.no_grad():
            stored = DenseWeight(weight)
            assert isinstance(stored.matmul(x, None, FAST, partials=True), Partials)
            assert isinstance(stored.matmul(x, None, INVARIANT, partials=True), Tensor)


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="a kernel for Hopper GPUs")
@pytest.mark.parametrize("M", [1, 6, 8, 9, 32, 48, 60, 64])
@pytest.mark.parametrize(("K", "H"), [(4096, 4096), (14336, 4096), (1544, 2088)])
def test_partials_are_the_product(M: int, K: int, H: int) -> None:
    """Keeps out: memory of a partial that nobody wrote, a bias in every one, rows of x or of the weight that don't exist."""
    torch.manual_seed(M)
    x, weight, bias = rand(M, K), rand(H, K, scale=K**-0.5), rand(H)
    with torch.no_grad():
        poison = [torch.full((splits, M, H), torch.nan, device=DEVICE) for splits in range(2, 9)]
        del poison  # partials may come to lie there
        partials, with_bias = (DenseWeight(weight).matmul(x, b, FAST, partials=True) for b in (None, bias))
        assert isinstance(partials, Partials) and isinstance(with_bias, Partials) and partials.sums_SMN.shape[0] > 1
        assert torch.equal(partials.tensor(), linear(x, weight))
    exact = F.linear(x.double(), weight.double(), bias.double())
    assert (with_bias.tensor().double() - exact).norm() < 4e-3 * exact.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="a kernel for Hopper GPUs")
@pytest.mark.parametrize("M", [65, 97, 150, 192])
@pytest.mark.parametrize("K", [4096, 14336])
def test_partials_of_more_rows(M: int, K: int) -> None:
    """Where cuBLAS computes the product.  Keeps out what the test above does, in tiles whose rows are the sum of two powers."""
    torch.manual_seed(M)
    x, weight, bias = rand(M, K), rand(4096, K, scale=K**-0.5), rand(4096)
    exact = F.linear(x.double(), weight.double())
    with torch.no_grad():
        poison = [torch.full((splits, M, 4096), torch.nan, device=DEVICE) for splits in (2, 2, 3)]
        del poison
        for b, want in ((None, exact), (bias, exact + bias.double())):
            partials = DenseWeight(weight).matmul(x, b, FAST, partials=True)
            assert isinstance(partials, Partials) and partials.sums_SMN.shape[0] == 2
            assert (partials.tensor().double() - want).norm() < 4e-3 * want.norm()


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="a kernel for Hopper GPUs")
@pytest.mark.parametrize("M", [1, 32, 60])
def test_chained_layers_in_a_graph(M: int) -> None:
    """Keeps out: a norm that reads partials before they are complete, and replays that find old ones."""
    H, K = 4096, 14336
    weights = [(rand(K, H, scale=H**-0.5), rand(H, K, scale=K**-0.5), rand(H)) for _ in range(6)]
    x0 = rand(M, H)

    def forward(partials: bool) -> Tensor:
        x, normed = x0, F.rms_norm(x0, (H,), None, EPS)
        for up, down, norm in weights:
            h = linear(normed, up)
            x, normed = add_rms_norm(x, DenseWeight(down).matmul(h, None, FAST, partials=partials), norm, EPS)
        return normed

    with torch.no_grad():
        want = forward(False)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            out = forward(True)
        for _ in range(20):
            out.fill_(float("nan"))
            graph.replay()
            assert torch.equal(out, want)


@pytest.mark.gpu
@pytest.mark.skipif(not IS_HOPPER, reason="a kernel for Hopper GPUs")
@pytest.mark.parametrize("M", [1, 32])
def test_a_layer_gives_the_same_bits(M: int) -> None:
    """Keeps out: partials taken for the product, or left where no norm follows."""
    rope = RopeConfig(10000.0)
    config = ModelConfig(
        family="llama", hidden_size=4096, intermediate_size=14336, num_layers=1, num_heads=32, num_kv_heads=8, head_dim=128,
        vocab_size=64, rms_norm_eps=EPS, rope=rope, max_position=64,
    )  # fmt: skip
    layer = build(lambda: DecoderLayer(config), torch.device(DEVICE), torch.bfloat16)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02 if parameter.dim() > 1 else 1.0)
    x, normed, at = rand(M, 4096), rand(M, 4096), torch.zeros(M, dtype=torch.int64, device=DEVICE)

    def attn(index: int, inputs: HeadInputs, rows_R: Tensor | None, scoring: Scoring) -> Tensor:
        return inputs.qkv_TXD[:, :32].contiguous()

    def run() -> tuple[Tensor, Tensor | Partials]:
        return layer(x, normed, Rotation(normed, at), attn, 0)  # type: ignore[no-any-return]

    with torch.no_grad():
        total, delta = run()
        assert isinstance(delta, Partials)
        got = total, *layer.input_layernorm.add(total, delta)
        layer.norm_follows = False
        layer.self_attn.o_proj = Whole(layer.self_attn.o_proj)
        total, whole = run()
        assert isinstance(whole, Tensor)
        want = total, *layer.input_layernorm.add(total, whole)
    assert all(map(torch.equal, got, want))
