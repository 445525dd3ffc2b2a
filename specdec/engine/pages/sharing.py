"""Finds rows of a running batch that begin with the same pages, and decides whether to read those pages once for all of them.

This module knows page numbers; it knows no text and no attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from specdec.engine.pages.prefix_cache import common_length
from specdec.steps import ShareRows


class PrefixGroup(NamedTuple):
    """Rows that begin with the same `pages` pages."""

    rows: list[int]
    pages: int


NO_GROUP = PrefixGroup([], 0)


def best_group(rows: Sequence[list[int]]) -> PrefixGroup:
    """The group that saves the most reads of pages: (rows - 1) * pages.

    rows: the leading pages of each row that may be shared.

    When rows are sorted by their pages, the rows of a group are adjacent.  A group then shares as many pages as that pair of
    neighbours in it which shares the fewest.  So the best group is the largest rectangle under a histogram in which each bar
    is the number of pages that two neighbours share.
    """
    order = sorted(range(len(rows)), key=lambda row: rows[row])
    common = [common_length(rows[a], rows[b]) for a, b in zip(order, order[1:], strict=False)]
    best, saved = NO_GROUP, 0
    open_runs: list[tuple[int, int]] = []  # (first bar, height) of rectangles that still grow; heights ascend
    for i, pages in enumerate([*common, 0]):
        first = i
        while open_runs and open_runs[-1][1] >= pages:
            first, least = open_runs.pop()
            if (i - first) * least > saved:
                best, saved = PrefixGroup(order[first : i + 1], least), (i - first) * least
        open_runs.append((first, pages))
    return PrefixGroup(sorted(best.rows), best.pages)


class RowSharing:
    """Chooses which rows read common pages together.  A choice holds until a row enters, leaves or moves.

    min_saved: a threshold for the keys that a round need not read again, (rows - 1) * tokens.  Below it rows read alone.
    group: the rows that read together; None: not chosen since the rows last changed.
    """

    def __init__(self, page_size: int, min_saved: float) -> None:
        self.page_size, self.min_saved = page_size, min_saved
        self.group: PrefixGroup | None = NO_GROUP

    def forget(self) -> None:
        """Drops the choice, because a row has entered, left or moved."""
        self.group = None

    def choose(self, rows: list[list[int]]) -> ShareRows | None:
        """Chooses a group if none is chosen.  Returns the step that tells the runner; None if nothing is new or no group pays.

        rows: for each row, its leading pages that never change; an empty list for a row that does not run.
        """
        if self.group is not None:
            return None
        self.group = best_group(rows)
        tokens = self.group.pages * self.page_size
        if self.group.rows and (len(self.group.rows) - 1) * tokens >= self.min_saved:
            pages = rows[self.group.rows[0]][: self.group.pages]
            return ShareRows(tuple(self.group.rows), tuple(pages), tokens)
        self.group = NO_GROUP
        return None

    @property
    def shares(self) -> bool:
        """Whether any rows read common pages together now."""
        return bool(self.group and self.group.rows)
