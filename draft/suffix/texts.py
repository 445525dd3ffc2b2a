"""The texts of tables on the host: corpora by name, and earlier answers, of which the oldest make room for new ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np

from specdec.draft.suffix.host_table import MAX_SCOPES, TOKEN_BYTES, TableText

ANSWERS_SHARE = 16  # earlier answers take one such part of corpus_memory, and corpora the others
MAX_ANSWERS = 8192  # that are kept: a table of more, of a few tokens each, would take the host long to make
ALL_ROWS = 1  # the key of the only scope of a table that all rows read


def capacities(memory: int) -> tuple[int, int]:
    """How many tokens the tables of corpora and of answers hold in so many bytes."""
    answers = memory // TOKEN_BYTES // ANSWERS_SHARE
    return memory // TOKEN_BYTES - answers, answers


def memory_for(tokens: int) -> str:
    """A corpus_memory that holds corpora of so many tokens, as users write it."""
    mebibytes = -(-tokens * TOKEN_BYTES * ANSWERS_SHARE // ((ANSWERS_SHARE - 1) << 20)) + 1
    return f"{mebibytes}MiB"


class Corpora:
    """Corpora, which all rows may be proposed.  capacity: tokens of all together."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._texts = dict[str, list[TableText]]()

    @property
    def names(self) -> list[str]:
        return list(self._texts)

    def left(self, name: str) -> int:
        """How many tokens a corpus of that name may have, with one more for each of its texts.  Any thread may ask."""
        held = list(self._texts.items())  # in one go: callers ask while another thread sets a corpus
        others = [text for other, texts in held if other != name for text in texts]
        return self.capacity - 1 - sum(text.room for text in others)

    def set(self, name: str, texts: Sequence[TableText]) -> None:
        """Adds or replaces a corpus; one without texts is forgotten.  ValueError if there is no room."""
        if (room := sum(text.room for text in texts)) > (left := self.left(name)):
            needed = memory_for(self.capacity - left + room)
            raise ValueError(
                f"corpus {name!r} has {room} tokens, and {max(0, left)} of the {self.capacity} that corpus_memory holds are "
                f"left; nearest settings that work: a shorter corpus, or corpus_memory={needed!r}"
            )
        self._texts.pop(name, None)
        if texts:
            self._texts[name] = list(texts)

    def by_scope(self) -> Mapping[int, Sequence[TableText]]:
        texts = [text for own in self._texts.values() for text in own]
        return {ALL_ROWS: texts} if texts else {}


class Answers:
    """Finished outputs of each scope.  capacity: tokens of all together, with what they take besides."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self._room = capacity, 1
        self._texts = deque[tuple[int, TableText]]()  # the oldest first
        self._counts = dict[int, int]()  # of each scope

    def add(self, scope: int, context: Sequence[int], output: Sequence[int]) -> None:
        """context: the tokens before the output, which show where it may begin."""
        tokens = [*context, *output]
        most = self.capacity - 2
        context_left = max(0, len(context) - max(0, len(tokens) - most))
        text = TableText(np.asarray(tokens[-most:], dtype=np.int32), context_left)
        self._texts.append((scope, text))
        self._room += text.room
        self._counts[scope] = self._counts.get(scope, 0) + 1
        while self._room > self.capacity or len(self._counts) > MAX_SCOPES or len(self._texts) > MAX_ANSWERS:
            oldest, gone = self._texts.popleft()
            self._room -= gone.room
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]

    def by_scope(self) -> Mapping[int, Sequence[TableText]]:
        found = dict[int, list[TableText]]()
        for scope, text in self._texts:
            found.setdefault(scope, []).append(text)
        return found
