"""Tiles of quantised products whose columns programs share: what their counters of arrivals take."""

import pytest

from specdec.ops.products.formats.quantised import Kind
from specdec.ops.products.kernels.dense.stream_triton import ARRIVALS
from specdec.ops.products.tiles.quantised import SEEN, hopper_tiles

SHAPES = [(N, K) for N in (1024, 4096, 6144, 8192, 17408, 34816, 131072) for K in (1024, 4096, 14336, 28672)]


@pytest.mark.parametrize(("kind", "group", "zero_points"), SEEN, ids=str)
def test_each_tile_of_a_split_product_has_a_counter(kind: Kind, group: int, zero_points: bool) -> None:
    """Keeps out: more tiles than counters, of which a program with two warpgroups takes two; a GPU alone would show it."""
    splits = 0
    for N, K in SHAPES:
        for M in (*range(1, 65, 7), 65, 96, 128, 190, 220, 256, 468, 500, 1000, 2048):
            if (tiles := hopper_tiles(M, N, K, kind, group, zero_points, False)) is not None and tiles.splits > 1:
                splits += 1
                assert -(-N // tiles.block_n) * -(-M // tiles.block_m) * tiles.of_program <= ARRIVALS, (M, N, K, tiles)
    assert splits > 10
