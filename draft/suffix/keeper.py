"""Keeps the texts of tables on the host, and makes tables of them on a thread of its own, which become steps for the runner.

Callers hand over tokens at any time and wait for nothing.  A table is made again once its texts have changed, but only a share
of the time goes into that.  This module knows tokens and steps; it knows no device and no request.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from specdec.draft.ngram.lookup import MAX_MATCH
from specdec.draft.suffix.host_table import HostTable, TableText, host_table
from specdec.draft.suffix.texts import Answers, Corpora
from specdec.tables.steps import PART_TOKENS, FillTable, TableName, TableStep, UseTable

LOOK = 0.05  # seconds between two looks at whether a table has been taken
REST = 4.0  # times as long as a table took to be made nothing is made: a fifth of one processor at most
Emit = Callable[[list[TableStep]], object]  # takes the steps of one table, to be run in this order, one between two rounds


class TableKeeper:
    """The texts of both tables, each of which may be missing.

    corpora: by name.  answers: by scope.  emit: called on the keeper's own thread.  is_behind: whether steps that were emitted
    are still to be run; no other table is made until they have been, so that they never pile up.
    """

    def __init__(
        self, corpora: Corpora | None, answers: Answers | None, emit: Emit, is_behind: Callable[[], bool] = lambda: False
    ) -> None:
        self.corpora, self.answers, self._emit, self._is_behind = corpora, answers, emit, is_behind
        self._finished: deque[tuple[int, Sequence[int], Sequence[int]]] = deque(maxlen=4096)  # that no table has yet
        self._changed = set[TableName]()
        self._news = threading.Condition()
        self._is_closed, self._is_making = False, False
        self._thread: threading.Thread | None = None

    def set_corpus(self, name: str, texts: Sequence[TableText]) -> None:
        """Adds a corpus, or puts it in the place of the one that was called so.  ValueError if it does not fit."""
        assert self.corpora is not None
        with self._news:
            self.corpora.set(name, texts)
            self._note("corpus")

    def add_answer(self, scope: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Keeps a finished output, as it is.  scope: the key of those who may be proposed it; 0: nobody."""
        if self.answers is None or not scope or not output:
            return
        with self._news:
            self._finished.append((scope, prompt[-MAX_MATCH:], output))
            self._note("answers")

    def first_corpus(self, name: str, texts: Sequence[TableText]) -> list[TableStep]:
        """The steps of a table with this corpus, made on the caller's thread.  ValueError if it does not fit."""
        assert self.corpora is not None
        self.corpora.set(name, texts)
        return [*steps_of("corpus", self._table("corpus"))]

    def wait(self, seconds: float = 60.0) -> bool:
        """Waits until the steps of all that was handed over have been emitted.  Whether they have."""
        with self._news:
            return self._news.wait_for(lambda: not self._changed and not self._is_making, timeout=seconds)

    def close(self) -> None:
        """Ends the thread; a table that is being made is not waited for."""
        with self._news:
            self._is_closed = True
            self._news.notify_all()

    def _note(self, name: TableName) -> None:
        """Records a change, for the thread, which begins with the first one.  The caller holds the lock."""
        self._changed.add(name)
        if self._thread is None and not self._is_closed:
            self._thread = threading.Thread(target=self._run, name="specdec tables", daemon=True)
            with suppress(RuntimeError):  # Python is about to end
                self._thread.start()
        self._news.notify_all()

    def _take(self) -> list[TableName]:
        with self._news:
            changed, self._changed = sorted(self._changed), set()
            while self._finished and self.answers is not None:
                self.answers.add(*self._finished.popleft())
        return changed

    def _table(self, name: TableName) -> HostTable:
        with self._news:
            source = self.corpora if name == "corpus" else self.answers
            assert source is not None
            texts: Mapping[int, Sequence[TableText]] = source.by_scope()
        return host_table(texts)

    def _run(self) -> None:
        while True:
            with self._news:
                self._news.wait_for(lambda: self._changed or self._is_closed)
                if self._is_closed:
                    return
                self._is_making = True
            begun = time.monotonic()
            for name in self._take():
                try:
                    self._emit([*steps_of(name, self._table(name))])
                except Exception as error:  # most often of memory: the texts stay, and the next change tries again
                    warnings.warn(f"no table of {name} could be made, and rounds read the last one: {error!r}", stacklevel=1)
            rest = REST * (time.monotonic() - begun)
            with self._news:
                self._is_making = False
                self._news.notify_all()
                self._news.wait_for(lambda: self._is_closed, timeout=rest)
                while self._is_behind() and not self._is_closed:  # rounds are slow
                    self._news.wait_for(lambda: self._is_closed, timeout=LOOK)


def steps_of(name: TableName, table: HostTable, most: int = PART_TOKENS) -> Iterator[TableStep]:
    """The steps that bring a table to a device, part by part.  most: tokens of a part."""
    for first in range(0, len(table.text_N), most):
        part = slice(first, first + most)
        yield FillTable(name, first, table.text_N[part], table.order_X[part])
    yield UseTable(name, table.keys_S, table.bounds_S2)
