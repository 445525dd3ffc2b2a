"""The source `answers`: earlier answers of this process, proposed to requests of the same scope alone."""

from __future__ import annotations

from specdec.draft.join.source import PathSource
from specdec.draft.suffix.source import TableSource
from specdec.draft.suffix.texts import capacities
from specdec.options import EngineOptions


def open_source(options: EngineOptions) -> PathSource:
    return TableSource("answers", "earlier answers", capacities(options.corpus_bytes)[1], by_scope=True)
