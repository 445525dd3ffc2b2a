"""The products' kernels against their definition.  Under Triton's interpreter where there is no GPU.

Shapes: M rows, K in, N out, F of a gated pair.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from toolkit.inside.captures import capturing
from toolkit.kernels import DEVICE, HAS_GPU
from torch import Tensor

from specdec.ops.products.dense import gated_linear, gelu_mul, linear, relu2, silu_mul
from specdec.ops.products.gpus import H100, H200, nearest
from specdec.ops.products.kernels.dense import stream_triton
from specdec.ops.products.kernels.dense.large_n_triton import launch_large_n_linear
from specdec.ops.products.kernels.dense.stream_triton import ARRIVALS, launch_activation, launch_linear
from specdec.ops.products.tiles.dense import (
    HELD_NUMBERS,
    HELD_ROWS,
    MOST_COLUMNS,
    MOST_SMALL,
    TILED_ABOVE,
    ProductTiles,
    product_tiles,
)

BOUNDS = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}  # norm(out - exact) / norm(exact)
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
NAN = float("nan")


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and partial sums start as NaN: what is read or returned unwritten shows."""
    plain = Tensor.new_empty

    def new_nan(self: Tensor, *shape: int, **kwargs: torch.dtype) -> Tensor:
        out = plain(self, *shape, **kwargs)
        return out.fill_(NAN) if out.is_floating_point() else out

    monkeypatch.setattr(Tensor, "new_empty", new_nan)


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def strided(M: int, K: int, dtype: torch.dtype) -> Tensor:
    """[M, K] inside a larger tensor that is NaN elsewhere: rows beyond M and columns beyond K are poison."""
    room = torch.full((M + 20, K + 16), NAN).to(DEVICE, dtype)
    room[:M, :K] = rand(M, K, dtype=dtype)
    return room[:M, :K]


def exact(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    product = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    return silu_mul(product) if gated else product


def check(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert got.dtype == dtype and got.shape == want.shape
    error = (got.double() - want).norm() / want.norm()
    assert error < BOUNDS[dtype], f"off by {float(error):.1e}"


@pytest.mark.slow_cases
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("M", "N", "K"), [(1, 64, 128), (6, 44, 90), (16, 32, 20), (19, 40, 72)])
def test_equals_the_definition(M: int, N: int, K: int, splits: int, gated: bool, dtype: torch.dtype) -> None:
    """Keeps out: padding that counts, gate and up swapped, a bias per tile, a split without columns, dense rows assumed."""
    x, weight, bias = (
        strided(M, K, dtype),
        rand(2 * N if gated else N, K, dtype=dtype),
        rand(2 * N if gated else N, dtype=dtype),
    )
    tiles = ProductTiles("stream_triton", max(8, 1 << (M - 1).bit_length()), 32, 32, splits, 4, 3)
    check(launch_linear(x, weight, bias, gated, tiles), exact(x, weight, bias, gated), dtype)
    check(launch_linear(x, weight, None, gated, tiles), exact(x, weight, None, gated), dtype)


@pytest.mark.slow_cases
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(("M", "block_m"), [(27, 32), (33, 48), (48, 48), (150, 192)])
@pytest.mark.parametrize(("N", "K"), [(72, 64), (40, 104)])
def test_large_n_equals_the_definition(M: int, block_m: int, N: int, K: int, gated: bool, dtype: torch.dtype) -> None:
    """Keeps out: the second piece of x or the second tile of the weight at the wrong rows, or either of them transposed; stores
    beyond M or N.
    """
    x, weight, bias = (
        strided(M, K, dtype),
        rand(2 * N if gated else N, K, dtype=dtype),
        rand(2 * N if gated else N, dtype=dtype),
    )
    tiles = ProductTiles("large_n_triton", block_m, 128 if HAS_GPU else 32, 32 if block_m == 192 else 64, 1, 4, 3)
    check(launch_large_n_linear(x, weight, bias, gated, tiles), exact(x, weight, bias, gated), dtype)
    check(launch_large_n_linear(x, weight, None, gated, tiles), exact(x, weight, None, gated), dtype)


def test_a_split_leaves_its_counters_as_it_found_them() -> None:
    """Keeps out: stale arrivals, by which a second launch or a graph's replay sums too early; sums in order of arrival."""
    x, weight = rand(5, 256), rand(48, 256)
    tiles = ProductTiles("stream_triton", 8, 16, 32, 4, 4, 2)
    outs = [launch_linear(x, weight, None, False, tiles) for _ in range(3)]
    check(outs[0], exact(x, weight, None, False), torch.float32)
    assert all(torch.equal(outs[0], out) for out in outs)
    assert not stream_triton.arrivals_of(x.device).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("M", "F_"), [(1, 64), (5, 100), (3, 2049)])
def test_activations_equal_their_definitions(M: int, F_: int, dtype: torch.dtype) -> None:
    """Keeps out: halves swapped, a block that reads on into the up half, NaN where exp overflows, and a square of a number
    below 0; a sum that is no number and becomes 0, by which a broken request would go on."""
    gate_up = strided(M, 2 * F_, dtype)
    gate_up[0, :2] = torch.tensor([-2e4, 2e4])
    check(launch_activation(gate_up, "swiglu"), silu_mul(gate_up.double()), dtype)
    check(launch_activation(gate_up, "geglu"), gelu_mul(gate_up.double()), dtype)
    assert launch_activation(gate_up[:0], "swiglu").shape == (0, F_)
    up = gate_up[:, 1:]
    up[0, 0], up[-1, -1] = torch.nan, -3
    got, want = launch_activation(up, "relu2"), relu2(up.double())
    assert got[0, 0].isnan() and torch.equal(got.nan_to_num(-1), want.to(dtype).nan_to_num(-1))


def test_without_a_gpu_or_with_gradients_it_is_torch() -> None:
    """Keeps out: a kernel that training would differentiate through, and an input of three dims refused."""
    x, weight, bias = rand(2, 3, 16).requires_grad_(), rand(12, 16), rand(12)
    assert torch.equal(linear(x, weight, bias), F.linear(x, weight, bias))
    gate, up = F.linear(x, weight, bias).chunk(2, dim=-1)
    out = gated_linear(x, weight, bias)
    assert torch.equal(out, F.silu(gate) * up)
    out.sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tiles_are_ones_that_a_hopper_runs(dtype: torch.dtype) -> None:
    """Keeps out: more shared memory than an SM has, more split tiles than counters, rows that no tile holds."""
    for M in (*range(66), 100, 128, 129, 160, 192, 193, 257, 1024, 1025):
        for N in (2, 256, 1400, 4096, 5120, 6144, 16383, 19456, 28672, 128256):
            for K in (16, 256, 4096, 14336, 28672):
                for kind, partials in ((H100, True), (H200, False), (H200, True)):
                    tiles = product_tiles(M, N, K, dtype, N == 28672, kind, partials)
                    hopper = kind == H200 and dtype != torch.float32 and K >= 1024
                    many = 0 < M <= (256 if hopper else 192) or (hopper and M >= 1024)
                    ours = 0 < M <= 64 or (N == 28672 and many) or (N == 128256 and 0 < M <= 128)
                    ours = ours or (partials and hopper and N == 4096 and 0 < M <= 192)
                    small = N * K <= HELD_NUMBERS and K <= MOST_COLUMNS and N % 8 == 0
                    ours = ours or (
                        kind == H200
                        and dtype != torch.float32
                        and small
                        and 0 < M <= (MOST_SMALL if N > HELD_ROWS else TILED_ABOVE)
                    )
                    assert (tiles is not None) == ours or dtype == torch.float32
                    if tiles is not None:
                        in_tiles = tiles.kernel in ("held_rows_hopper", "tiled_triton")
                        in_tiles = in_tiles or (tiles.kernel.endswith("_hopper") and tiles.block_m > 16)
                        assert tiles.block_m >= M or in_tiles
                        assert tiles.shared_bytes(dtype.itemsize) <= 232_448
                        assert tiles.splits == 1 or -(-N // tiles.block_n) <= ARRIVALS
                        if tiles.kernel == "stream_hopper":
                            assert kind == H200 and N % 8 == K % 8 == 0 and tiles.splits <= -(-K // tiles.block_k)


def test_small_weights_are_shared_by_programs() -> None:
    """Keeps out: DFlash2's kernels [1024, 4096] and gates [256, 4096] read by 64 programs of two warps, or by 16."""
    for (N, K), M in itertools.product(((1024, 4096), (256, 4096), (1664, 6656)), (9, 16, 40, 64)):
        tiles = product_tiles(M, N, K, torch.bfloat16, False, H200)
        assert tiles is not None and tiles.kernel == "stream_hopper" and tiles.splits == 4
        assert tiles.block_m >= M and tiles.shared_bytes(2) <= 232_448


def test_no_wave_of_programs_is_nearly_empty() -> None:
    """Keeps out: the tiles of Qwen3.5-27B's MLP falling back to 80 programs on 132 SMs, and to a third wave of 16."""
    for M in (1, 6, 32, 64):
        down = product_tiles(M, 5120, 17408, torch.bfloat16, False, H200, True)
        gate_up = product_tiles(M, 34816, 5120, torch.bfloat16, True, H200, False)
        assert down is not None and gate_up is not None
        assert down.splits == 3 and 2 * down.shared_bytes(2) <= 232_448 < 2 * gate_up.shared_bytes(2)


@pytest.mark.parametrize(
    ("name", "bandwidth", "capability", "kind", "hopper", "measured"),
    [("NVIDIA H100 80GB HBM3", 3.35e12, (9, 0), H100, True, True), ("NVIDIA H200", None, (9, 0), H200, True, True),
     ("NVIDIA H200 NVL", 4.92e12, (9, 0), H200, True, True), ("NVIDIA H100 PCIe", 2.04e12, (9, 0), H100, True, False),
     ("NVIDIA H100 NVL", 3.94e12, (9, 0), H100, True, False), ("NVIDIA GH200 480GB", 4.02e12, (9, 0), H100, True, False),
     ("NVIDIA GH200 144G HBM3e", 4.9e12, (9, 0), H200, True, False), ("NVIDIA H20", 4.9e12, (9, 0), H200, True, False),
     ("NVIDIA A100-SXM4-80GB", 2.04e12, (8, 0), H100, False, False), ("NVIDIA B200", 8e12, (10, 0), H200, False, False),
     ("Unheard of", None, (9, 0), H100, True, False)],
)  # fmt: skip
def test_a_gpu_takes_the_tiles_of_its_kind_or_of_the_nearest(
    name: str, bandwidth: float | None, capability: tuple[int, int], kind: object, hopper: bool, measured: bool
) -> None:
    """Keeps out: tiles of a slower memory on a faster one, a Hopper kernel elsewhere, a guess that is not said to be one, such
    as that of a card whose name has another kind's in it, or whose memory is another."""
    match = nearest(name, bandwidth, capability)
    assert (match.kind, match.hopper) == (kind, hopper)
    assert ("none were measured" in match.why) != measured


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU or torch.cuda.get_device_capability() != (9, 0), reason="a kernel for Hopper GPUs")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("M", "N", "K", "tiles", "gated"),
    [(1, 72, 264, (8, 64, 256, 1, 4, 3), False), (6, 1048, 4096, (8, 64, 256, 2, 4, 6), False),
     (8, 264, 1000, (8, 128, 128, 1, 4, 3), True), (16, 40, 104, (16, 64, 128, 1, 4, 5), True),
     (31, 72, 1000, (32, 64, 128, 3, 4, 4), True), (33, 328, 72, (64, 64, 64, 2, 4, 4), False),
     (64, 1048, 4096, (64, 64, 128, 1, 4, 6), False), (44, 1048, 4096, (48, 64, 128, 2, 4, 7), False),
     (48, 264, 1000, (48, 64, 128, 1, 4, 3), True), (192, 136, 1000, (192, 128, 64, 4, 8, 5), False),
     (250, 264, 512, (256, 128, 64, 1, 8, 4), True), (700, 520, 264, (192, 128, 64, 1, 8, 5), False)],
)  # fmt: skip
def test_hopper_equals_the_definition(
    M: int, N: int, K: int, tiles: tuple[int, int, int, int, int, int], gated: bool, dtype: torch.dtype
) -> None:
    """Keeps out: a stage that is filled before it was read, gate and up of other rows, a split without columns, stores beyond
    M or N.
    """
    from specdec.ops.products.kernels.dense.stream_hopper import launch_hopper_linear

    rows = 2 * N if gated else N
    x, weight, bias = strided(M, K, dtype), rand(rows, K, dtype=dtype), rand(rows, dtype=dtype)
    for b in (bias, None):
        got = launch_hopper_linear(x, weight, b, gated, ProductTiles("stream_hopper", *tiles))
        check(got, exact(x, weight, b, gated), dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU or torch.cuda.get_device_capability() != (9, 0), reason="a kernel for Hopper GPUs")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("M", "N", "K", "programs"),
    [(1, 8, 64, 132), (130, 136, 1000, 3), (500, 520, 264, 132), (1100, 264, 72, 5), (128, 128, 8, 1)],
)
def test_gated_hopper_equals_the_definition(M: int, N: int, K: int, programs: int, dtype: torch.dtype) -> None:
    """Keeps out: a step that is loaded over one that is still read, or that nobody frees; a tile of the result that is written
    over one on its way to memory; gate and up of other rows; places of tiles that no program computes.
    """
    from specdec.ops.products.kernels.dense.gated_hopper import launch_gated_hopper

    tiles = ProductTiles("gated_hopper", 128, 256, 64, 1, 4, 4)

    x, weight, bias = strided(M, K, dtype), rand(2 * N, K, dtype=dtype), rand(2 * N, dtype=dtype)
    for b in (bias, None):
        check(launch_gated_hopper(x, weight, b, tiles, programs), exact(x, weight, b, True), dtype)


MODEL = [(6144, 4096, False), (4096, 4096, False), (28672, 4096, True), (4096, 14336, False), (32000, 4096, False),
         (6144, 8192, False), (4096, 12288, False), (16600, 264, False), (16600, 264, True), (1400, 256, False),
         (256, 700, False)]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("M", [1, 6, 8, 10, 16, 32, 48, 60, 64, 65, 100, 128, 129, 160, 192, 250, 1020, 2300])
def test_real_shapes_on_a_gpu(M: int, dtype: torch.dtype) -> None:
    """Keeps out: tiles of the policy that are wrong or too large on the machine they are for."""
    for N, K, gated in [*MODEL, (1024, 4096, False), (256, 4096, False)]:
        x, weight = rand(M, K, dtype=dtype), (torch.randn(N, K, device=DEVICE) * K**-0.5).to(dtype)
        bias = rand(N, dtype=dtype) if N == 6144 else None
        with torch.no_grad():
            got = gated_linear(x, weight, bias) if gated else linear(x, weight, bias)
        check(got, exact(x, weight, bias, gated), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("M", [6, 192])
def test_chained_products_in_a_graph(M: int) -> None:
    """Keeps out: a product that reads its input before the one before it is done; counters that a replay finds stale."""
    with torch.no_grad():
        weights = [(torch.randn(N, K, device=DEVICE) * K**-0.5).bfloat16() for N, K in [(28672, 4096), (4096, 14336)] * 6]
        x = rand(M, 4096, dtype=torch.bfloat16)

        def forward() -> Tensor:
            h = x
            for gate_up, down in zip(weights[::2], weights[1::2]):
                h = F.rms_norm(h + linear(gated_linear(h, gate_up), down), (4096,))
            return h

        want = forward()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            out = forward()
        for _ in range(20):
            out.fill_(NAN)
            graph.replay()
            assert torch.equal(out, want)
