"""Where flash-attn 4's call measured faster than our kernel, by shapes that the host knows.  Imports no library.

Measured by benchmarks/flash.py on an H100 (benchmarks/results/flash_h100.json): bf16, heads of 128, pages of 16.
"""

from __future__ import annotations

from typing import NamedTuple


class Dispatched(NamedTuple):
    """The only shapes the rule speaks of."""

    head_dim: int
    architecture: tuple[int, int]


DISPATCHED = Dispatched(128, (9, 0))


def fa4_is_faster(rows: int, packed: int, keys: int) -> bool:
    """rows: sequences; packed: queries x heads of a group that read the same keys; keys: what the page table can hold."""
    return packed > 128 and rows >= 8


def where_fa4_is_faster(rows: int, packed: int, keys: int) -> str:
    """Why `auto` takes it for up to so many sequences; the empty string if it does not."""
    if not fa4_is_faster(rows, packed, keys):
        return ""
    return "flash-attn 4 reads the prefix where it measured faster (more than 128 queries x heads a key, 8 sequences or more)"
