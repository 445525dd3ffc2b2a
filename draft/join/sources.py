"""The sources of paths that can be joined with a drafter.  A source is a file that declares it (source.py), and a line here."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from specdec.draft.kind import PREDICTION, SUFFIX
from specdec.options import EngineOptions

if TYPE_CHECKING:
    from specdec.draft.join.source import PathSource

SOURCES = {SUFFIX: "specdec.draft.ngram.source"}  # how `draft=` spells a source: the module that makes it, by open_source

ALWAYS = {PREDICTION: "specdec.draft.prediction.source"}  # likewise, of sources that join wherever others do


def open_source(name: str, options: EngineOptions) -> PathSource:
    """The source of that name.  ValueError if these options make it impossible."""
    source: PathSource = import_module({**SOURCES, **ALWAYS}[name]).open_source(options)
    assert source.name == name
    return source
