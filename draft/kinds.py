"""The kinds of drafters, those that have a name and those that are told by their files.  A kind is a folder that declares it
(kind.py), and a line here.

Files of no kind here are a head's; find.py tells names from folders.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from specdec.draft.kind import DrafterKind, FolderKind
from specdec.options import EngineOptions

KINDS = {  # how `draft=` spells a kind: the module that declares it, as KIND
    "mtp": "specdec.draft.mtp.kind",
    "ngram": "specdec.draft.ngram.kind",
}
BY_FILES = {  # likewise, of kinds that `draft=` names by a folder
    "assistant": "specdec.draft.assistant.kind",
    "model": "specdec.draft.model.kind",
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


def kinds_by_files() -> list[FolderKind]:
    found = [import_module(BY_FILES[name]).KIND for name in BY_FILES]
    assert all(isinstance(kind, FolderKind) and kind.name == name for kind, name in zip(found, BY_FILES, strict=True))
    return found


def kind_of_files(place: Path, options: EngineOptions) -> FolderKind | None:
    """The kind that knows the folder, or the file; None: a head's."""
    return next((kind for kind in kinds_by_files() if kind.knows(place, options)), None)
