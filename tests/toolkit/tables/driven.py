"""The part of the test driver that brings tables of other texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np

from specdec import SpecDecoder
from specdec.draft.suffix.host_table import TableText, host_table
from specdec.draft.suffix.keeper import steps_of
from specdec.tables.steps import FillTable
from toolkit.inside.hooks import Hooks


class TableHooks(Hooks):
    """What `Driver` does with corpora and earlier answers."""

    decoder: SpecDecoder

    def bring_corpus(self, texts: Sequence[Sequence[int]], most: int = 1 << 20) -> None:
        """Makes these ids the decoder's corpus: at once, or part by part while a text runs.  most: tokens of a part."""
        keeper = self.decoder._tables.keeper
        given = [TableText(np.asarray(ids, dtype=np.int32)) for ids in texts]
        keeper.corpora.set("ids", given)
        steps = steps_of("corpus", keeper._table("corpus"), most)
        if self._engine.is_idle:
            for step in steps:
                self._runner.run(step)
        else:
            self._engine.table_steps.extend(steps)

    def bring_answers(self, texts: Mapping[int, Sequence[int]], most: int, failing: int | None = None) -> None:
        """Makes these the earlier answers, by scope, while nothing runs.  failing: which part the runner has no memory for."""
        table = host_table({scope: [TableText(np.asarray(ids, dtype=np.int32))] for scope, ids in texts.items()})
        self._engine.table_steps.extend(steps_of("answers", table, most))
        run, parts = self._runner.run, count(1)

        def run_or_fail(step: Any) -> Any:
            if isinstance(step, FillTable) and next(parts) == failing:
                raise MemoryError("no room for this part")
            return run(step)

        self._runner.run = run_or_fail
        try:
            self._engine.run_table_steps()
        finally:
            del self._runner.run

    @property
    def coming_parts(self) -> int:
        """How many steps of tables have not run yet."""
        return len(self._engine.table_steps)

    def settle_tables(self) -> None:
        """Waits until all answers so far are in the table."""
        assert self.decoder.settle_tables() and not self.coming_parts
