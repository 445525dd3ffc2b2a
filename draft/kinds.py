"""The kinds of drafters that have a name.  A kind is a folder that declares it (kind.py), and a line here.

A head is named by its folder or hub id; find.py tells names from folders.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from specdec.draft.kind import DrafterKind

KINDS = {  # how `draft=` spells a kind: the module that declares it, as KIND
    "mtp": "specdec.draft.mtp.kind",
    "ngram": "specdec.draft.ngram.kind",
}


def kind_of(name: object) -> DrafterKind | None:
    """The kind of that name; None: it is no name."""
    if not isinstance(name, str) or name not in KINDS:
        return None
    kind = import_module(KINDS[name]).KIND
    assert isinstance(kind, DrafterKind) and kind.name == name
    return kind


def all_kinds() -> list[DrafterKind]:
    return [kind for name in KINDS if (kind := kind_of(name))]


def listed(word: Callable[[DrafterKind], str]) -> str:
    """The kinds in a sentence, as "mtp or ngram".  word: what stands for each."""
    return " or ".join(map(word, all_kinds()))
