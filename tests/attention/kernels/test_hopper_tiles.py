"""The rule that chooses paged_hopper.py's kernel and its tiles, and that the kernel compiles; neither needs a GPU."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from specdec.attention.caches.heads_cache import MHAView
from specdec.attention.kernels import hopper_tiles as rule
from specdec.attention.kernels.hopper_tiles import _tiles
from specdec.attention.kernels.tiles_triton import PagedTiles
from specdec.attention.kinds import PLAIN
from specdec.attention.pages import PageTable
from specdec.attention.plan import causal_segment

SHARED_MEMORY = 232_448 - 1024  # bytes of a program alone on an SM, without what the system keeps


def test_tiles_fit_the_shared_memory_of_an_sm() -> None:
    """Keeps out: tiles of which fewer programs fit an SM than `splits_for` plans for."""
    taken = 0
    for seqlen_q_packgqa, D, branches, pairs, keys in itertools.product(
        (1, 4, 16, 24, 64, 128, 240, 1024), (64, 128, 256), (False, True), (1, 8, 64, 256), (16, 1100, 32_768)
    ):
        tiles = _tiles(seqlen_q_packgqa, D, branches, pairs, keys, 132)
        if tiles is None:
            continue
        taken += 1
        assert (
            tiles.hopper and tiles.block_n * D * 4 * tiles.stages + tiles.block_m * D * 2 <= SHARED_MEMORY // tiles.ctas_per_sm
        )
    assert taken > 100


def chosen(
    queries: int = 6, page_size: int = 16, heads: tuple[int, int, int] = (2, 4, 128), measured: bool | None = True, **known: Any
) -> PagedTiles | None:
    """The rule's answer for a chain of so many queries.  heads: kv heads, group, head dim.  known: fields of the segment."""
    K, G, D = heads
    view = MHAView(torch.zeros(64, 2, K, D, dtype=torch.bfloat16))
    pages = PageTable(torch.zeros(1, 512, dtype=torch.int32), page_size)
    segment = replace(causal_segment(pages, torch.ones(1, dtype=torch.int32), queries), **known)
    return rule.hopper_tiles(torch.zeros(queries, G * K, D, dtype=torch.bfloat16), view, segment, PLAIN, 132, measured)


def test_what_the_kernel_cannot_read_keeps_the_other_one() -> None:
    """Keeps out: a kernel that only Hopper GPUs can compile, chosen elsewhere, or for pages, groups and heads beyond it."""
    assert chosen(measured=None) is None, "this GPU is none"
    assert chosen() is not None and chosen(page_size=64, heads=(2, 8, 64)) is not None
    assert chosen(page_size=40_192) is not None, "a page as long as a sequence"
    assert chosen(heads=(2, 3, 128)) == chosen(), "a group is padded"
    for other in ({"page_size": 8}, {"page_size": 48}, {"heads": (2, 65, 128)}, {"heads": (2, 4, 96)}):
        assert chosen(**other) is None, other


def test_a_prompt_is_judged_by_what_the_host_knows_of_it() -> None:
    """Keeps out: a short prompt that is taken for a long one because the model could read more."""
    eight: Any = {"queries": 256, "heads": (8, 4, 128)}
    assert chosen(**eight) is not None, "the table has room for 8,192 tokens"
    assert chosen(**eight, max_cached=0) is None and chosen(**eight, max_cached=7000) is not None
