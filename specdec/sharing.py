"""Which rows of a running batch begin with the same pages, and whether reading these once for all of them pays.

Knows numbers only: no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

# (rows - 1) * tokens: keys that one round need not read twice, from which reading them once is faster.  Measured; see
# benchmarks/shared_prefix.py.  On a CPU one dense product over all rows' keys answers all of them, so nothing is saved.
LEAST_SAVED = {"cuda": 4096.0, "cpu": math.inf}


class Group(NamedTuple):
    """Rows that begin with the same `pages` pages."""

    rows: list[int]
    pages: int


NOBODY = Group([], 0)


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading elements two lists share.  Halving: comparing slices is much faster than a loop."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def best_group(rows: Sequence[Sequence[int]]) -> Group:
    """rows: the leading pages of each row that may be shared.  The group that saves the most reads: (rows - 1) * pages.

    In sorted order groups lie together, and what one shares is the least that neighbours in it do.
    """
    order = sorted(range(len(rows)), key=lambda row: rows[row])
    common = [common_length(rows[a], rows[b]) for a, b in zip(order, order[1:], strict=False)]
    best, saved = NOBODY, 0
    for i in range(len(common)):
        least = common[i]
        for j in range(i, len(common)):
            least = min(least, common[j])
            if not least:
                break
            if (j - i + 1) * least > saved:
                best, saved = Group(sorted(order[i : j + 2]), least), (j - i + 1) * least
    return best
