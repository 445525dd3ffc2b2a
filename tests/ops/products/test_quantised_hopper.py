"""Products with quantised weights written for Hopper GPUs: against float64 there, and on any machine what can be seen without
one.

Shapes: M rows, K in, N out.
"""

from itertools import product

import pytest
import torch
from toolkit.kernels import DEVICE
from toolkit.quantised_weights import FORMATS, check_tiles, error, exact, random_weight

from specdec.ops.products.formats.quantised import Kind, pack, pack_factor_of
from specdec.ops.products.numerics import FAST
from specdec.ops.products.partials import Partials, added_up
from specdec.ops.products.quantised import QuantisedWeight
from specdec.ops.products.tiles.quantised import FEW, MAX_M, MAX_M_GROUPED, SEEN, QuantisedTiles, hopper_tiles

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not HAS_HOPPER, reason="kernels for Hopper GPUs")
SHAPES = ((6144, 4096, False), (4096, 4096, False), (28672, 4096, True), (4096, 14336, False), (10240, 8192, False),
          (57344, 8192, True), (8192, 28672, False), (1024, 512, False), (1024, 256, False), (2056, 1032, False),
          (16384, 128, False))  # fmt: skip


@pytest.mark.parametrize("kind", ["e4m3", "int4"])
def test_words_are_pieces_of_consecutive_columns(kind: Kind) -> None:
    """What the kernels do with words, in torch.  Keeps out: another order of columns in `pack`, which they would not notice."""
    pack_factor = pack_factor_of(kind)
    qvalues_NK = torch.randint(0, 256 // (pack_factor - 1) ** 3 if pack_factor == 2 else 16, (3, 128), dtype=torch.uint8)
    words_NJ = pack(kind, qvalues_NK).view(torch.int16).int() & 0xFFFF
    bits = 16 // pack_factor
    of_word = torch.stack([words_NJ >> n * bits & (1 << bits) - 1 for n in range(pack_factor)], dim=-1)  # [N, J, code]
    pieces = of_word.unflatten(1, (-1, 16)).transpose(2, 3)  # [N, J / 16, code, 16]
    assert torch.equal(pieces.flatten(1), qvalues_NK.int())


def test_tiles_fit_a_hopper() -> None:
    """Keeps out: more shared memory or registers than an SM has, more split tiles than counters, a group in parts of two
    slices, a group of warps without a step, which would wait for one without end.
    """
    forms = dict.fromkeys((*FORMATS, *SEEN))
    rows = 1, 8, 9, 16, 17, 32, 33, FEW, FEW + 1, 128, 129, 192, 256, 500, 1024, MAX_M, MAX_M + 1
    for (kind, group, zero_points), M, (N, K, gated) in product(forms, rows, SHAPES):
        pack_factor = pack_factor_of(kind)
        for partials in (False,) if gated else (False, True):
            tiles = hopper_tiles(M, N, K, kind, group, zero_points, gated, partials)
            runs = (
                (kind, group, zero_points) in SEEN and M <= (MAX_M_GROUPED if group else MAX_M) and K % (64 * pack_factor) == 0
            )
            assert (tiles is not None) == runs, (kind, group, M, N, K)
            if tiles is None:
                continue
            check_tiles(tiles, M, N, K, 16 // pack_factor, 64 * pack_factor, partials)
            assert tiles.kernel == "warp_hopper" or group % (tiles.block_k // 2) == 0


# M, N, K, whether gated, tiles; a slice's columns are of the kind
WARP = (
    (1, 72, 512, True, (1, 32, 0, 1, 8, 3, 4, 80)), (1, 1048, 1280, False, (1, 64, 0, 3, 4, 4, 1, 128)),
    (6, 264, 2048, True, (8, 64, 0, 2, 8, 3, 2, 80)), (13, 40, 256, False, (16, 128, 0, 1, 8, 2, 1, 128)),
    (8, 264, 4096, False, (8, 32, 0, 1, 4, 2, 4, 80)),
)  # fmt: skip
WARPGROUP = (
    (31, 1048, 1280, False, (32, 128, 128, 3, 8, 2, 1, 96)), (64, 264, 1024, True, (64, 64, 128, 1, 4, 4, 1, 80)),
    (70, 72, 512, True, (64, 64, 128, 2, 4, 4, 1, 128)), (70, 264, 2048, True, (32, 256, 128, 2, 8, 3, 1, 168)),
    (130, 264, 2048, True, (128, 128, 128, 3, 8, 4, 1, 168)),
    (190, 328, 1280, False, (128, 64, 256, 2, 4, 2, 1, 144)),
    (200, 264, 1024, True, (192, 128, 128, 1, 8, 3, 1, 168)),
    (90, 1048, 1280, False, (96, 64, 128, 1, 4, 4, 1, 128)),
    (150, 72, 512, True, (160, 128, 128, 1, 8, 3, 1, 168)),
    (19, 264, 2048, True, (32, 64, 128, 2, 8, 4, 2, 80)), (64, 1048, 1280, False, (64, 64, 128, 1, 8, 3, 2, 80)),
)  # fmt: skip


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("kind", "group", "zero_points"), [*SEEN, ("int4", 64, True)])
@pytest.mark.parametrize("warpgroup", [False, True])
def test_hopper_kernels_compute_the_product(kind: Kind, group: int, zero_points: bool, warpgroup: bool) -> None:
    """Keeps out: a stage that is filled before it was read, gate and up of other rows, a scale of another group or row, a split
    without columns, stores beyond M or N, columns beyond K, steps that both warpgroups take or none, a group's sum that is
    left out, and, where another kernel is to add up the splits, a bias in each of them or a place that nobody wrote.
    """
    from specdec.ops.products.kernels.quantised.hopper_launch import launch_quantised_hopper

    for M, N, K, gated, numbers in WARPGROUP if warpgroup else WARP:
        tiles = QuantisedTiles("warpgroup_hopper" if warpgroup else "warp_hopper", *numbers)
        if tiles.kernel == "warp_hopper":  # a slice is 64 words
            tiles = tiles._replace(block_k=tiles.slices * 64 * pack_factor_of(kind))
        if group and (K % group or group % (tiles.block_k // 2) and tiles.kernel == "warpgroup_hopper"):
            continue
        weight = random_weight(kind, group, zero_points, 2 * N if gated else N, K)
        x = torch.randn(M, K + 8, device=DEVICE, dtype=torch.bfloat16)[:, :K]
        bias = torch.randn(2 * N if gated else N, device=DEVICE, dtype=torch.bfloat16)
        for b in (bias, None):
            y = launch_quantised_hopper(x, weight, b, gated, tiles)
            assert error(y, exact(x, weight, gated, b)) < 4e-3, (M, N, K, gated)
            if not gated:
                partials = Partials(launch_quantised_hopper(x, weight, b, gated, tiles, store_partials=True), x.dtype)
                assert (
                    partials.sums_SMN.shape[0] == tiles.splits and error(partials.tensor(), exact(x, weight, gated, b)) < 4e-3
                )
                assert b is not None or torch.equal(partials.tensor(), y), (M, N, K, tiles)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("kind", "group", "zero_points"), SEEN)
def test_chosen_tiles_compute_the_product(kind: Kind, group: int, zero_points: bool) -> None:
    """Keeps out: tiles of the policy that are wrong or too large on the machine they are for, and partials that are not the
    product's, bit for bit where both have the same tiles.
    """
    from specdec.ops.products.kernels.quantised.hopper_launch import launch_quantised_hopper

    shapes = (4096, 14336, False), (32768, 1024, True), (6144, 2048, False), (4096, 1024, False)
    for M, (N, K, gated) in product((1, 7, 13, 32, 64, 70, 190, 2000), shapes):
        tiles, of_partials = (hopper_tiles(M, N, K, kind, group, zero_points, gated, partials) for partials in (False, True))
        if group and M > MAX_M_GROUPED:
            continue
        assert tiles is not None and of_partials is not None
        weight = random_weight(kind, group, zero_points, N, K)
        x = torch.randn(M, K, device=DEVICE, dtype=torch.bfloat16)
        y = launch_quantised_hopper(x, weight, None, gated, tiles)
        assert error(y, exact(x, weight, gated)) < 4e-3, (M, N, K)
        if not gated:
            with torch.no_grad():
                partials = QuantisedWeight(weight).matmul(x, None, FAST, partials=True)
            assert isinstance(partials, Partials) == (of_partials.splits > 1), (M, N, K)
            assert torch.equal(added_up(partials), y) if tiles == of_partials else M > FEW, (M, N, K)
            assert error(added_up(partials), exact(x, weight, gated)) < 4e-3, (M, N, K)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("kind", "group", "zero_points"), SEEN)
def test_a_product_is_the_same_each_time(kind: Kind, group: int, zero_points: bool) -> None:
    """Keeps out: memory that TMA fills while warps still read it, which shows in few programs now and then."""
    from specdec.ops.products.kernels.quantised.hopper_launch import launch_quantised_hopper

    for M, (N, K, gated) in product((1, 5, 8, 16, 60, 192), ((28672, 4096, True), (4096, 14336, False))):
        tiles = hopper_tiles(M, N, K, kind, group, zero_points, gated)
        assert tiles is not None
        weight, x = random_weight(kind, group, zero_points, N, K), torch.randn(M, K, device=DEVICE, dtype=torch.bfloat16)
        y = launch_quantised_hopper(x, weight, None, gated, tiles)
        differ = torch.zeros((), dtype=torch.int64, device=DEVICE)
        for _ in range(300):
            differ += (launch_quantised_hopper(x, weight, None, gated, tiles) != y).any()
        assert differ.item() == 0, (M, N, K)
