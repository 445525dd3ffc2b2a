"""Which rows of a running batch begin with the same pages, and whether reading these once for all of them pays.

Knows page numbers; no text, and no attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specdec.engine.pages.prefix_cache import common_length
from specdec.steps import ShareRows


class Group(NamedTuple):
    """Rows that begin with the same `pages` pages."""

    rows: list[int]
    pages: int


NOBODY = Group([], 0)


def best_group(rows: Sequence[list[int]]) -> Group:
    """rows: the leading pages of each row that may be shared.  The group that saves the most reads: (rows - 1) * pages.

    In sorted order the rows of a group lie side by side, and what a group shares is the least that its neighbours share.  So
    the best group is the largest rectangle under a histogram of what neighbours share.
    """
    order = sorted(range(len(rows)), key=lambda row: rows[row])
    common = [common_length(rows[a], rows[b]) for a, b in zip(order, order[1:], strict=False)]
    best, saved = NOBODY, 0
    open_runs: list[tuple[int, int]] = []  # (first neighbours, pages) of runs that share so many pages so far, ever more
    for i, pages in enumerate([*common, 0]):
        first = i
        while open_runs and open_runs[-1][1] >= pages:
            first, least = open_runs.pop()
            if (i - first) * least > saved:
                best, saved = Group(order[first : i + 1], least), (i - first) * least
        open_runs.append((first, pages))
    return Group(sorted(best.rows), best.pages)


class RowSharing:
    """Lets rows read together what they share, from one change of membership to the next.

    least_saved: the threshold of (rows - 1) * tokens, the keys that a round need not read again, from which rows do.
    group: the rows that do; None: not chosen yet.
    """

    def __init__(self, page_size: int, least_saved: float) -> None:
        self.page_size, self.least_saved = page_size, least_saved
        self.group: Group | None = NOBODY

    def forget(self) -> None:
        """Rows came, went or moved."""
        self.group = None

    def choose(self, rows: list[list[int]]) -> ShareRows | None:
        """rows: of each row, the pages that never change; none of a row that does not run.  A step if the group is new."""
        if self.group is not None:
            return None
        self.group = best_group(rows)
        tokens = self.group.pages * self.page_size
        if self.group.rows and (len(self.group.rows) - 1) * tokens >= self.least_saved:
            pages = rows[self.group.rows[0]][: self.group.pages]
            return ShareRows(tuple(self.group.rows), tuple(pages), tokens)
        self.group = NOBODY
        return None

    @property
    def shares(self) -> bool:
        """Whether any rows read together now."""
        return bool(self.group and self.group.rows)
