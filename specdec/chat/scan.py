"""Finds marks in a text that comes in pieces, wherever it is cut."""

from __future__ import annotations

import re
from collections.abc import Collection


class MarkScanner:
    """Looks for marks, the longest where several begin at one place."""

    def __init__(self, marks: Collection[str]) -> None:
        ordered = sorted({mark for mark in marks if mark}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        self._beginnings = {mark[:size] for mark in ordered for size in range(1, len(mark))}
        self._longest = max(map(len, ordered), default=0)

    def find(self, text: str) -> tuple[int, str] | None:
        """The place of the first mark, and the mark; None: there is none."""
        found = self._pattern.search(text) if self._pattern is not None else None
        return None if found is None else (found.start(), found.group())

    def held_back(self, text: str) -> int:
        """How many characters at a text's end may be the beginning of a mark."""
        for size in range(min(len(text), self._longest - 1), 0, -1):
            if text[-size:] in self._beginnings:
                return size
        return 0
