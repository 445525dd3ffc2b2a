"""Which paged segments paged_hopper.py's kernel reads, and in which tiles.

It runs on Hopper GPUs, and is taken on H200s and the GPUs nearest to them.  It reads what TMA can load: 16-bit keys and values
of one width, side by side, in pages of at least 16 tokens.  Of these it takes the shapes for which it was measured to be
faster: benchmarks/layers/README.md, "Why the tiles and rules are what they are".  The kernel itself is not imported here,
because other GPUs can't compile it.

Shapes: T queries, H heads, K kv heads, D head dim.
"""

from __future__ import annotations

from functools import cache, lru_cache

import torch
import triton
from torch import Tensor

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.kernels.tiles_triton import SHORT, PagedTiles
from specdec.attention.kinds import Scoring
from specdec.attention.segment import Segment
from specdec.ops.launch import has_gluon
from specdec.ops.products.gpus import H200, match_of

MIN_PAGE = 16  # the K of a wgmma over 16-bit values
WIDTHS = (64, 128, 256)  # head dims


def hopper_tiles(
    q_THD: Tensor, view: object, segment: Segment, scoring: Scoring, programs: int, measured: bool | None = None
) -> PagedTiles | None:
    """The tiles of paged_hopper.py's kernel for a segment; None: paged_triton.py's kernel reads it.

    programs: how many programs the GPU is taken to run at once.  measured: whether it counts as measured; None: as it is.
    """
    measured = is_measured(q_THD.device) if measured is None else measured
    if not (measured and isinstance(view, MHAView) and scoring.slopes_H is None):
        return None
    (_, H, D), K, P = q_THD.shape, view.kv.shape[2], segment.pages.page_size
    group, aligned = (
        triton.next_power_of_2(H // K),
        all(number * 2 % 16 == 0 for number in (*q_THD.stride()[:2], view.kv.stride(0))),
    )
    if q_THD.dtype.itemsize != 2 or not aligned or q_THD.data_ptr() % 16 or view.kv.data_ptr() % 16:
        return None
    if D not in WIDTHS or view.kv.stride()[1:] != (K * D, D, 1) or not reads_pages(P) or group > 64:
        return None
    seqlen_q_packgqa, branches = segment.max_seqlen_q * group, segment.max_seqlen_q > 1 and not segment.causal
    keys = segment.max_keys
    if segment.max_cached is not None:  # of prompts that run eagerly the host knows more than the table's capacity
        keys = min(keys, segment.max_cached + segment.max_seqlen_q)
    return _tiles(seqlen_q_packgqa, D, branches, segment.rows * K, keys, programs)


def reads_pages(page_size: int) -> bool:
    """Whether blocks of keys, of 32 or 64, are some whole pages, or lie on one page."""
    return page_size in (MIN_PAGE, 32) or page_size % 64 == 0


@lru_cache
def _tiles(seqlen_q_packgqa: int, D: int, branches: bool, pairs: int, max_keys: int, programs: int) -> PagedTiles | None:
    """seqlen_q_packgqa: as in AttentionShape (flash/rule.py), with groups padded to a power of two.  branches: whether queries
    are a tree's.  pairs: rows x kv heads.  max_keys: the most keys of a row that the host can't exclude, mostly the table's
    capacity.

    In most cases two programs an SM, each with two stages, are fastest.  One with three stages is where there is just one
    for each SM, over the many keys of one row, for small trees and for wide heads.
    """
    tiles = -(-seqlen_q_packgqa // 64)
    waves, few = pairs * tiles / programs, max_keys <= SHORT
    if not _taken(tiles, seqlen_q_packgqa, D, branches, waves, few):
        return None
    alone = PagedTiles(64, 64 if D <= 128 else 32, 4, 3, 64, registers=232, hopper=True)
    fills = tiles == 1 and not branches and 0.8 <= waves <= 1.0
    small = branches and waves <= 0.15 if few else tiles == 1 and not branches and waves <= 0.1
    if D == 256 or fills or small:
        return alone
    return alone._replace(stages=2, registers=128, ctas_per_sm=2, joined=tiles > 1)


def _taken(tiles: int, seqlen_q_packgqa: int, D: int, branches: bool, waves: float, few: bool) -> bool:
    """Whether the kernel was measured to be at least as fast as the other one.

    tiles: of a row and kv head.  waves: programs without splits, as a share of those that the GPU runs at once.  few: whether
    rows can't have more than SHORT keys.
    """
    if D == 256:
        return waves <= 0.4
    if seqlen_q_packgqa <= 8 and few and waves <= 0.1:
        return False  # a single query at batch 1 is as fast there
    if branches and few:
        return waves <= (0.8 if D <= 64 else 0.4)  # 96 trees of 64 queries: 14.6 us in place of 22.7 with heads of 64
    if tiles > 1 and few:
        return waves <= 0.5 or 3 <= waves <= 20
    return waves <= 4 or tiles > 1 and not branches


@cache
def is_measured(device: torch.device) -> bool:
    """Whether the device runs the kernel, and takes the tiles of the GPU on which it was measured, an H200."""
    if device.type != "cuda" or not has_gluon():
        return False
    match = match_of(device)
    return match.hopper and match.kind == H200
