"""Which paged segments wide_hopper.py's kernel reads, in which tiles, and Triton's tiles for heads of more than 256.

The kernel reads what TMA can load, as paged_hopper.py's does, of the widths in HOPPER_TILES.  It is not imported here, because
other GPUs can't compile it.  Why the choices are what they are: benchmarks/layers/README.md.

Shapes: T queries, H heads, K kv heads, D width of a key and E of a value.
"""

from __future__ import annotations

from functools import lru_cache

import triton
from torch import Tensor

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.caches.layout import CachedHeads
from specdec.attention.caches.split_cache import SplitView
from specdec.attention.kernels.hopper_tiles import is_measured, reads_pages
from specdec.attention.kernels.tiles_triton import MIN_COLUMNS, MergeTiles, PagedTiles, padded
from specdec.attention.kinds import Scoring
from specdec.attention.segment import Segment

WIDE = 256  # wider heads have tiles of their own
ROWS = 64  # of a tile of wide_hopper.py's kernel
LARGE = 160_000  # threshold: bytes of shared memory from which on a GPU has room for 64 queries and two stages of 32 keys
HOPPER_TILES = {  # by widths of keys and values
    (512, 512): PagedTiles(64, 32, 8, 2, 64, registers=168, hopper=True),
    (192, 128): PagedTiles(64, 64, 4, 2, 64, registers=168, ctas_per_sm=2, hopper=True),
}
MANY_TILES = {  # the same, of wide_many_hopper.py's kernel, for more than 64 queries x heads
    (512, 512): PagedTiles(128, 64, 8, 1, 64, registers=168, hopper=True, parts=2),
    (192, 128): PagedTiles(128, 64, 8, 4, 64, registers=168, hopper=True),
}
LARGE_BLOCKS = {(192, 128): MANY_TILES[192, 128]._replace(block_n=128, stages=2)}  # where a row has several such tiles
FEW_WINDOWS = 8  # threshold: rows, below which the few keys of windows are read by tiles of 64 (1 and 32 were measured)


def reads_widths(view: CachedHeads) -> bool:
    """Whether wide_hopper.py's kernel is the one for these widths."""
    k, v = view.heads
    return (k.shape[2], v.shape[2]) in HOPPER_TILES


def wide_hopper_tiles(
    q_THD: Tensor, view: CachedHeads, segment: Segment, scoring: Scoring, measured: bool | None = None
) -> PagedTiles | None:
    """The tiles of wide_hopper.py's kernel for a segment; None: paged_triton.py's kernel reads it.

    measured: whether the GPU counts as one on which the kernel was measured; None: as it is.
    """
    measured = is_measured(q_THD.device) if measured is None else measured
    if not (measured and isinstance(view, MHAView | SplitView) and reads_widths(view) and scoring.slopes_H is None):
        return None
    (_, H, D), (k, v) = q_THD.shape, view.heads
    K, E = k.shape[1], v.shape[2]
    is_row = k.stride()[1:] == (D, 1) and v.stride()[1:] == (E, 1) and v.data_ptr() - k.data_ptr() == K * D * k.itemsize
    strides = (*q_THD.stride()[:2], k.stride(0))
    is_aligned = not any(number * 2 % 16 for number in strides) and not (q_THD.data_ptr() % 16 or k.data_ptr() % 16)
    if q_THD.dtype.itemsize != 2 or q_THD.stride(2) != 1 or not is_row or not is_aligned:
        return None
    if not reads_pages(segment.pages.page_size) or triton.next_power_of_2(H // K) > 64:
        return None
    packed, windowed = segment.max_seqlen_q * triton.next_power_of_2(H // K), segment.starts_T is not None
    return _tiles_of(D, E, packed, windowed, segment.rows, segment.pages.page_size)


def lies_on_pages(block_n: int, page_size: int) -> bool:
    """Whether blocks of so many keys are some whole pages, or lie on one page: blocks of 128 cross pages of 192."""
    return block_n % page_size == 0 or page_size % block_n == 0


@lru_cache
def _tiles_of(D: int, E: int, seqlen_q_packgqa: int, windowed: bool, rows: int, page_size: int) -> PagedTiles:
    """seqlen_q_packgqa: queries x heads of a padded group."""
    if seqlen_q_packgqa <= ROWS or (windowed and rows < FEW_WINDOWS):
        return HOPPER_TILES[D, E]
    large = LARGE_BLOCKS.get((D, E)) if seqlen_q_packgqa > 2 * ROWS and not windowed else None
    return large if large is not None and lies_on_pages(large.block_n, page_size) else MANY_TILES[D, E]


@lru_cache
def wide_tiles(seqlen_q_packgqa: int, itemsize: int, quant: str, room: int) -> PagedTiles:
    """paged_triton.py's tiles for heads of more than 256; the arguments are those of `paged_tiles` and of `within`.

    Eight warps hold a tile's queries and weighted values, 64 rows at most: four would spill registers.
    """
    wanted = max(16, triton.next_power_of_2(seqlen_q_packgqa))
    if itemsize == 4:
        return PagedTiles(16, 16, 8, 2)
    if room < LARGE:
        return PagedTiles(min(wanted, 32), 16, 8, 3)
    if quant:
        return PagedTiles(min(wanted, 64), 32, 8, 3 if wanted <= 32 else 2)
    return PagedTiles(min(wanted, 64), 32, 8, 3 if wanted == 16 else 2)


def wide_merge_tiles(splits: int, group: int, E: int) -> MergeTiles:
    """Tiles of a merge with a suffix of such keys, by four warps.  group: padded heads of a group.  E: value dim.

    Programs that share out columns each multiply whole keys again: 18.4 us for a tree of 32 over 8 splits of 8 heads of 512,
    6.7 us in these tiles.  More heads leave registers for fewer columns.
    """
    columns = max(MIN_COLUMNS, min(padded(E), 8 * 512 // group))
    return MergeTiles(columns, min(2, max(1, splits)))
