"""Which rows of a running batch begin with the same pages, and whether reading these once for all of them pays.

Knows page numbers; no text, and no attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from specdec.attention.shared import SharedPrefix
from specdec.batch.state import BatchState
from specdec.engine.pages.prefix_cache import common_length

# (rows - 1) * tokens: keys that a round need not read again, from which reading them once is faster: it costs a launch or two
# more a layer.  On an H100 at the Llama-3.1-8B shape (benchmarks/shared_prefix.py), 2 to 32 rows, 512 to 8192 tokens: with this
# bound rounds take on average 0.2% longer than with the better choice of each.  On a CPU nothing is gained: there one dense
# product over all rows' keys answers all of them.
LEAST_SAVED = {"cuda": 20_000.0, "cpu": math.inf}
# Queries x heads of a row that read each key: beyond, a row alone does so much arithmetic on each key that nothing is gained by
# reading it less often.
MOST_PACKED = 64


class Group(NamedTuple):
    """Rows that begin with the same `pages` pages."""

    rows: list[int]
    pages: int


NOBODY = Group([], 0)


def best_group(rows: Sequence[list[int]]) -> Group:
    """rows: the leading pages of each row that may be shared.  The group that saves the most reads: (rows - 1) * pages.

    In sorted order groups lie together, and what one shares is the least that neighbours in it do: so it is the largest
    rectangle under a histogram.
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


def can_share(heads_a_key: int) -> bool:
    """Whether some pass of the target can gain: not where one query's heads (128 over a DeepSeek's latent) are too many."""
    return heads_a_key <= MOST_PACKED


class RowSharing:
    """Lets rows read together what they share, from one change of membership to the next.

    heads_a_key: of the target, query heads that read one key; the draft's passes go by it too.  group: the rows that do;
    None: not chosen yet.  least_saved: (rows - 1) * tokens from which they do.
    """

    def __init__(self, state: BatchState, page_size: int, heads_a_key: int) -> None:
        self.shared, self.page_size = SharedPrefix.empty(state.page_table_BW, MOST_PACKED // heads_a_key), page_size
        self.least_saved = LEAST_SAVED[state.lens_B.device.type]
        self.group: Group | None = NOBODY

    def forget(self) -> None:
        """Rows came, went or moved."""
        self.group = None

    def apply(self, state: BatchState, prefixes: Callable[[], list[list[int]]]) -> BatchState:
        """The same rows, with what they share where that pays.  prefixes: the pages of each running row that never change."""
        if self.group is None:
            rows = prefixes()
            self.group = best_group(rows)
            tokens = self.group.pages * self.page_size
            if self.group.rows and (len(self.group.rows) - 1) * tokens >= self.least_saved:
                self.shared.set(self.group.rows, rows[self.group.rows[0]][: self.group.pages], tokens)
            else:
                self.group = NOBODY
        return state.sharing(self.shared) if self.group.rows else state
