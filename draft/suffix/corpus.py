"""The source `corpus`: texts that the user names, which all rows may be proposed."""

from __future__ import annotations

from specdec.draft.join.source import PathSource
from specdec.draft.suffix.source import TableSource
from specdec.draft.suffix.texts import capacities
from specdec.options import EngineOptions


def open_source(options: EngineOptions) -> PathSource:
    return TableSource("corpus", "a corpus", capacities(options.corpus_bytes)[0], by_scope=False)
