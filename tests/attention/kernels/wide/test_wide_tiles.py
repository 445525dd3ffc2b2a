"""Which kernel for Hopper GPUs reads a segment of wide heads: the rule alone, without a GPU."""

from dataclasses import replace

import pytest
import torch

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.split_cache import SplitLayout
from specdec.attention.kernels.tiles_triton import PagedTiles
from specdec.attention.kernels.wide.wide_tiles import wide_hopper_tiles
from specdec.attention.kinds import PLAIN
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment

GEMMA, MIMO = (32, 4, 512, 512), (64, 4, 192, 128)  # H, K, D, E


def tiles_of(
    heads: tuple[int, int, int, int], rows: int, queries: int, windowed: bool = False, page_size: int = 16
) -> PagedTiles | None:
    H, K, D, E = heads
    pages = PageTable(torch.zeros(rows, 4, dtype=torch.int32), page_size)
    segment = causal_segment(pages, torch.full((rows,), 60, dtype=torch.int32), queries, "queries")
    if windowed:
        segment = replace(segment, starts_T=torch.zeros(rows * queries, dtype=torch.int32))
    row = torch.zeros(64, K * (D + E), dtype=torch.bfloat16)
    view = MHAView(row.view(-1, 2, K, D)) if D == E else SplitLayout(K, D, E, row.dtype).view(0, {"kv": row})
    return wide_hopper_tiles(torch.zeros(rows * queries, H, D, dtype=torch.bfloat16), view, segment, PLAIN, measured=True)


@pytest.mark.parametrize(
    ("heads", "rows", "queries", "windowed", "rows_of_tile"),
    [
        (GEMMA, 1, 8, False, 64), (GEMMA, 1, 9, False, 128), (MIMO, 1, 4, False, 64), (MIMO, 1, 6, False, 128),
        (MIMO, 1, 32, True, 64), (MIMO, 32, 32, True, 128), (MIMO, 32, 1, True, 64),
    ],
)  # fmt: skip
def test_many_rows_have_larger_tiles(
    heads: tuple[int, int, int, int], rows: int, queries: int, windowed: bool, rows_of_tile: int
) -> None:
    """Keeps out: keys and values that L2 is asked for once more for every 64 rows; tiles of 128 for the few keys of windows."""
    tiles = tiles_of(heads, rows, queries, windowed)
    assert tiles is not None and tiles.block_m == rows_of_tile
    assert tiles.parts == (2 if heads == GEMMA and rows_of_tile == 128 else 1)


def test_trees_read_larger_blocks() -> None:
    """Keeps out: blocks for which shared memory has no room beside as many stages."""
    chain, tree = tiles_of(MIMO, 1, 6), tiles_of(MIMO, 1, 32)
    assert chain is not None and tree is not None and (chain.block_n, tree.block_n) == (64, 128)
    for tiles in (chain, tree):
        assert tiles.stages * tiles.block_n * (192 + 128) * 2 + tiles.block_m * 192 * 2 < 227 * 1024


@pytest.mark.parametrize("page_size", [16, 32, 64, 128, 192, 256, 320])
def test_no_block_crosses_pages(page_size: int) -> None:
    """Keeps out: a block of 128 keys that begins within a page of 192, of which TMA reads 64 of another sequence."""
    for heads in (GEMMA, MIMO):
        for queries in (1, 6, 32, 60):
            tiles = tiles_of(heads, 1, queries, page_size=page_size)
            assert tiles is not None and (tiles.block_n % page_size == 0 or page_size % tiles.block_n == 0)
