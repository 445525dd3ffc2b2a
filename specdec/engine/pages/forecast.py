"""Foresees how many pages running requests will hold at once, by how long outputs turned out to be so far.

A request may write up to max_tokens, and most write much less.  So whether one more may enter is decided by an estimate.  If it
was too low, rows step back; if it was too high, requests wait although they would have fitted.  This module knows counts only.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

KEPT = 256  # lengths of the last outputs
# Before anything was measured, an output is taken to go on for so many tokens, or for as many as it has already.  Later that
# weighs as much as GUESSES outputs.
GUESS, GUESSES = 256, 4


class OutputLengths:
    """Lengths of the last outputs, in tokens."""

    def __init__(self) -> None:
        self._last: deque[int] = deque()
        self._sorted: list[int] = []
        self._sums = [0]  # of the first i of _sorted

    def add(self, length: int) -> None:
        """An output has ended."""
        if len(self._last) == KEPT:
            self._sorted.pop(bisect_left(self._sorted, self._last.popleft()))
        self._last.append(length)
        insort(self._sorted, length)
        self._sums = list(accumulate(self._sorted, initial=0))

    def rest(self, written: int, most: int) -> int:
        """How many more tokens an output is expected to get that has so many, and may get at most `most`: the mean of what
        longer outputs got, and of some guesses.
        """
        above, capped = bisect_right(self._sorted, written), bisect_left(self._sorted, written + most)
        capped = max(above, capped)
        longer = len(self._sorted) - above
        tokens = self._sums[capped] - self._sums[above] - written * (capped - above) + most * (len(self._sorted) - capped)
        guess = min(most, max(GUESS, written))
        return math.ceil((tokens + GUESSES * guess) / (longer + GUESSES))


class RowForecast(NamedTuple):
    """What is expected of a row.

    rest: tokens that it will still get.  freed: pages that it gives back at its end.
    """

    rest: int
    freed: int


def most_growth(rows: Iterable[RowForecast], page_size: int) -> int:
    """By how many pages the rows together will hold more than now, when they hold most.

    All rows get tokens at one pace.  When the row with the least rest ends, it gives its pages back; until then all rows grow.
    """
    by_rest = sorted(rows)
    most = given_back = 0
    for ended, (rest, freed) in enumerate(by_rest):
        most = max(most, (len(by_rest) - ended) * -(-rest // page_size) - given_back)
        given_back += freed
    return most
