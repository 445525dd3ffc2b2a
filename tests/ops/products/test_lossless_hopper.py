"""Products with lossless weights on a Hopper GPU, against float64.

Shapes: M rows, K in, N out.
"""

from functools import partial
from itertools import product

import pytest
import torch
from toolkit.kernels import DEVICE
from toolkit.quantised_weights import error

from specdec.ops.products.dense import DenseWeight
from specdec.ops.products.formats.lossless import LosslessMatrix, encode_lossless
from specdec.ops.products.gpus import H100, H200, match_of
from specdec.ops.products.lossless import LosslessWeight
from specdec.ops.products.numerics import FAST, INVARIANT, Numerics
from specdec.ops.products.partials import Partials, added_up
from specdec.ops.products.tiles.lossless import lossless_tiles
from specdec.ops.products.tiles.quantised import QuantisedTiles

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_HOPPER, reason="kernels for Hopper GPUs")]

# M, N, K, whether gated, tiles
WARP = (
    (1, 72, 512, True, (1, 32, 512, 1, 8, 3, 4, 80)), (1, 1048, 1280, False, (1, 64, 128, 3, 4, 4, 1, 128)),
    (6, 264, 2048, True, (8, 64, 256, 2, 8, 3, 2, 96)), (8, 264, 4096, False, (8, 32, 512, 1, 4, 2, 4, 96)),
    (13, 40, 256, False, (16, 128, 128, 1, 8, 2, 1, 128)), (1, 264, 1152, False, (1, 32, 512, 2, 8, 3, 4, 80)),
    (6, 264, 1152, False, (8, 64, 256, 2, 8, 3, 2, 96)),
)  # fmt: skip
WARPGROUP = (
    (31, 1048, 1280, False, (32, 128, 128, 3, 8, 2, 1, 96)),
    (64, 264, 1024, True, (64, 64, 128, 1, 4, 4, 1, 128)),
    (70, 72, 512, True, (64, 64, 128, 2, 4, 4, 1, 128)), (70, 264, 2048, True, (32, 256, 128, 2, 8, 3, 1, 168)),
    (19, 264, 2048, True, (32, 64, 256, 2, 8, 3, 2, 96)), (64, 1048, 1280, False, (64, 64, 128, 1, 8, 3, 2, 128)),
    (19, 264, 1152, False, (32, 64, 256, 2, 8, 3, 2, 96)),
)  # fmt: skip


def random_pair(N: int, K: int, width: float = 1.3) -> tuple[torch.Tensor, LosslessMatrix]:
    """A weight, and the same in 12 bits.  With a width of 1 rows of 4096 values have up to about 13 outliers, with 0 about 3.

    One row is zeros.
    """
    weight = 0.02 * torch.randn(N, K, device=DEVICE) * torch.exp(width * torch.randn(N, K, device=DEVICE))
    weight[N // 2] = 0
    weight = weight.bfloat16()
    lossless = encode_lossless(weight)
    assert lossless is not None
    return weight, lossless


def exact(x: torch.Tensor, weight: torch.Tensor, gated: bool, bias: torch.Tensor | None = None) -> torch.Tensor:
    want = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    if not gated:
        return want
    gate, up = want.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("wide", [False, True])
def test_the_kernels_compute_the_product(wide: bool) -> None:
    """Keeps out: an outlier that is added for another row of x or of the weight, twice, or by no program that shares a tile;
    columns beyond the last one, where quantised values are zeros and mean another value; and what test_quantised_hopper.py
    keeps out of these kernels.
    """
    from specdec.ops.products.kernels.quantised.hopper_launch import launch_quantised_hopper

    for M, N, K, gated, numbers in WARPGROUP if wide else WARP:
        tiles = QuantisedTiles("warpgroup_hopper" if wide else "warp_hopper", *numbers)
        weight, lossless = random_pair(2 * N if gated else N, K)
        assert K < 1024 or lossless.max_outliers_E.max() > 4, "more than are read together"
        x = torch.randn(M, K + 8, device=DEVICE, dtype=torch.bfloat16)[:, :K]
        bias = torch.randn(2 * N if gated else N, device=DEVICE, dtype=torch.bfloat16)
        for b in (bias, None):
            y = launch_quantised_hopper(x, lossless, b, gated, tiles)
            assert error(y, exact(x, weight, gated, b)) < 4e-3, (M, N, K, gated)
            if not gated:
                partials = Partials(launch_quantised_hopper(x, lossless, b, gated, tiles, store_partials=True), x.dtype)
                assert (
                    partials.sums_SMN.shape[0] == tiles.splits and error(partials.tensor(), exact(x, weight, gated, b)) < 4e-3
                )
                assert error(partials.sums_SMN.sum(0), exact(x, weight, gated, b)) < 1e-5, "outliers that are not exact"


@pytest.mark.parametrize("width", [0.0, 1.0])
def test_chosen_tiles_compute_the_product(width: float) -> None:
    """Keeps out: tiles of the policy that are wrong or too large on the machine they are for, and partials that are not the
    product's, bit for bit.
    """
    from specdec.ops.products.kernels.quantised.hopper_launch import launch_quantised_hopper

    for N, K, gated in ((4096, 14336, False), (32768, 1024, True), (6144, 2048, False), (4096, 1024, False)):
        weight, lossless = random_pair(N, K, width)
        for M, kind in product((1, 7, 13, 32, 60), (H100, H200)):
            tiles = lossless_tiles(M, N, K, gated, kind)
            x = torch.randn(M, K, device=DEVICE, dtype=torch.bfloat16)
            if tiles is not None:
                assert error(launch_quantised_hopper(x, lossless, None, gated, tiles), exact(x, weight, gated)) < 4e-3, (
                    M,
                    N,
                    K,
                )
            if kind is not match_of(x.device).kind:
                continue
            stored = LosslessWeight(DenseWeight(weight), lossless)
            with torch.no_grad():
                if gated:
                    y = stored.gated(x, None, FAST)
                    assert error(y, exact(x, weight, True)) < 6e-3
                    continue
                y, partials = added_up(stored.matmul(x, None, FAST)), stored.matmul(x, None, FAST, partials=True)
                assert tiles is None or (
                    isinstance(partials, Partials) == (tiles.splits > 1) and torch.equal(added_up(partials), y)
                )
                assert error(y, exact(x, weight, False)) < 4e-3


def test_the_copy_is_read_by_few_rows_alone() -> None:
    """Keeps out: a copy that is read while sums must be taken in one order, while a gradient is recorded, for other dtypes or
    for more rows than were measured; or by nobody.  The ordinary weight is zeros here, so that one tells which was read.
    """
    zeros, lossless = torch.zeros(1024, 1024, device=DEVICE, dtype=torch.bfloat16), random_pair(1024, 1024)[1]

    def reads(rows: int, numerics: Numerics, dtype: torch.dtype = torch.bfloat16) -> bool:
        x = torch.randn(rows, 1024, device=DEVICE, dtype=dtype)
        stored = LosslessWeight(DenseWeight(zeros.to(dtype)), lossless)
        products = stored.matmul, partial(stored.matmul, partials=True), stored.gated
        found = {bool(added_up(each(x, None, numerics)).any()) for each in products}
        assert len(found) == 1
        return found.pop()

    with torch.no_grad():
        assert reads(1, FAST) and reads(8, FAST) and reads(32, FAST)
        assert not reads(4, INVARIANT) and not reads(4, FAST, torch.float32) and not reads(65, FAST)
    with torch.enable_grad():
        assert not reads(4, FAST)


def test_a_product_is_the_same_each_time() -> None:
    """Keeps out: memory that TMA fills while warps still read it, counts of outliers from memory that is no
    longer theirs (kernels ran without end now and then), which shows in few programs, where two share an SM.
    """
    from specdec.ops.products.kernels.quantised.hopper_launch import launch_quantised_hopper

    tilings = [(M, lossless_tiles(M, N, K, gated, kind), N, K, gated)
               for (N, K, gated), kind in product(((28672, 4096, True), (4096, 14336, False)), (H100, H200))
               for M in (1, 5, 8, 16, 32, 60)]  # fmt: skip
    tilings.append((16, QuantisedTiles("warpgroup_hopper", 16, 64, 256, 1, 4, 3, 1, 96), 28672, 4096, True))
    pairs = {(N, K): random_pair(N, K, 0.0)[1] for _, _, N, K, _ in tilings}
    for M, tiles, N, K, gated in tilings:
        if tiles is None:
            continue
        x = torch.randn(M, K, device=DEVICE, dtype=torch.bfloat16)
        y = launch_quantised_hopper(x, pairs[N, K], None, gated, tiles)
        differ = torch.zeros((), dtype=torch.int64, device=DEVICE)
        for _ in range(300):
            differ += (launch_quantised_hopper(x, pairs[N, K], None, gated, tiles) != y).any()
        assert differ.item() == 0, (M, N, K, tiles)
