"""Finds and opens what a caller names to draft: a kind by its name, a head or a model by its folder, or several sources."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specdec.checks import nearest_name
from specdec.draft.formats.open import HowToRead
from specdec.draft.join.sources import SOURCES
from specdec.draft.kind import ANSWERS, CORPUS, SUFFIX, Draft, OpenDrafter
from specdec.draft.kinds import KINDS, all_kinds, kind_of, kind_of_files
from specdec.draft.load import HeadDrafter
from specdec.models.checkpoints.checkpoint import resolve_target
from specdec.models.checkpoints.mistaken import refuse_itself
from specdec.models.config import ModelConfig
from specdec.options import EngineOptions

HEADS_ONLY = ("draft_format", "draft_pickle", "draft_quantize", "beyond_trained")  # options that say how a head is read


def head_folder(draft: str | Path) -> Path:
    """The folder of a head or of a small model, or that one's GGUF file.  ValueError or TypeError if there is none; it names a
    kind that is spelled alike.
    """
    if isinstance(draft, bool):
        raise TypeError(f"draft must be a folder, a hub id or the name of a kind, got {draft}; nearest setting: draft=None")
    try:
        return resolve_target(draft, "draft")
    except ValueError as error:
        if not (meant := nearest_name(str(draft).strip(), [*KINDS, "None"])):
            raise
        raise ValueError(f"{error}; nearest setting that works: draft={None if meant == 'None' else meant!r}") from None


class Joined(NamedTuple):
    """A drafter that was found, which is joined by sources of paths, of these names."""

    drafter: str | Path
    sources: tuple[str, ...] = (SUFFIX,)


def find_drafter(draft: Draft, options: EngineOptions) -> str | Path | Joined | None:
    """The name of a kind, or the place of a drafter's files; None for no drafter.  A hub is asked once, here.

    A folder that is called as a kind is named with its path: "./ngram".  ValueError or TypeError if there is no such drafter,
    or for an option that would do nothing.
    """
    listed: list[Any] = list(draft) if isinstance(draft, list | tuple) else [draft]
    if options.corpus is not None:
        refuse_no_corpus(options.corpus, draft)
        listed += [] if CORPUS in listed else [CORPUS]
    elif options.corpus_memory != EngineOptions().corpus_memory and not {CORPUS, ANSWERS} & {*map(str, listed)}:
        raise ValueError(
            f"corpus_memory={options.corpus_memory!r} would do nothing without a source {CORPUS!r} or {ANSWERS!r}; nearest "
            f"setting that works: corpus_memory={EngineOptions().corpus_memory!r}"
        )
    if len(listed) == 1 and not isinstance(draft, list | tuple) and not _is_source(draft):
        return _find_one(listed[0], options)
    drafter, sources = _told_apart(listed)
    found = _find_one(drafter, options)
    assert isinstance(found, str | Path)
    return Joined(found, sources) if sources else found


def _find_one(draft: str | Path | None, options: EngineOptions) -> str | Path | None:
    if draft is None or kind_of(draft):
        assert draft is None or isinstance(draft, str)
        refuse_idle(options, draft)
        return draft
    return head_folder(draft)


def _is_source(one: Any) -> bool:
    return isinstance(one, str) and one in SOURCES


def refuse_no_corpus(corpus: str | Path, draft: Draft) -> None:
    """ValueError for a corpus that is no file, and for one beside no drafter."""
    if draft is None or draft == SUFFIX:
        raise ValueError(
            f"corpus={str(corpus)!r} joins the trees of a drafter, got draft={draft!r}; nearest settings that work: "
            "draft=DIR, or corpus=None"
        )
    if not Path(corpus).is_file():
        raise ValueError(f"corpus must be a file of text or a .jsonl file, got {str(corpus)!r}, which is none")


def _told_apart(draft: Sequence[str | Path]) -> tuple[str | Path, tuple[str, ...]]:
    """The drafter among several sources, and the sources of paths; the text's own matches are the first of these if there are
    any.  ValueError if they are not one drafter, and each source once at most.
    """
    named = [one for one in draft if not _is_source(one)]
    sources = [str(one) for one in draft if _is_source(one)]
    if len(named) == 1 and not isinstance(named[0], str | Path):
        raise TypeError(f"each source of draft must be a name or a folder, got {named[0]!r}; nearest setting: a string")
    if len(named) != 1 or len(sources) > len(set(sources)) or (SUFFIX in sources and named[0] == "ngram"):
        alone = f"; nearest setting that works: draft={list(named[:1]) + [SUFFIX]!r}" if named and named[0] != "ngram" else ""
        alone = alone or f"; nearest setting that works: draft='ngram', which is {SUFFIX!r} alone"
        known = ", ".join(map(repr, SOURCES))
        raise ValueError(f"several sources are one drafter and some of {known}, got draft={list(draft)!r}{alone}")
    return named[0], tuple(name for name in SOURCES if name in sources or (sources and name == SUFFIX and named[0] != "ngram"))


def open_drafter(
    found: str | Path | Joined | None, options: EngineOptions, target: ModelConfig, target_folder: Path
) -> OpenDrafter | None:
    """What `find_drafter` found, by its config and headers; None for no drafter."""
    if found is None:
        return None
    one = found.drafter if isinstance(found, Joined) else found
    if kind := kind_of(one):
        own = kind.open(target_folder, target)
    else:
        by_files = open_by_files(Path(one), options, target, target_folder)
        own = by_files or HeadDrafter(Path(one), target, how_to_read(options))
    if not isinstance(found, Joined) and not (kind and kind.joins):
        return own
    from specdec.draft.join.open import OpenJoined
    from specdec.draft.join.sources import ALWAYS, open_source

    names = (*(found.sources if isinstance(found, Joined) else ()), *ALWAYS)
    return OpenJoined(own, [open_source(name, options) for name in names])


def open_by_files(place: Path, options: EngineOptions, target: ModelConfig, target_folder: Path) -> OpenDrafter | None:
    """What a kind makes of files that it knows; None: they are a head's.  ValueError if they are the target's own."""

    def instead() -> str:
        """A kind that can draft for the target; one with weights rather than one without."""
        kinds = sorted(all_kinds(), key=lambda kind: not kind.has_files)
        best = next(kind for kind in kinds if not kind.refusal(target_folder, target))
        return f"draft={best.name!r}, {best.instead}"

    refuse_itself(place, target_folder, instead)
    kind = kind_of_files(place, options)
    return None if kind is None else kind.open(place, options, target_folder, target)


def how_to_read(options: EngineOptions) -> HowToRead:
    """What these options say of a head's files."""
    window = options.beyond_trained == "window"
    return HowToRead(options.draft_format, options.draft_pickle, window, options.draft_quantize)


def refuse_idle(options: EngineOptions, draft: str | Path | None) -> None:
    """ValueError for options that say how a head is read where no head is read."""
    defaults = EngineOptions()
    if idle := [name for name in HEADS_ONLY if getattr(options, name) != getattr(defaults, name)]:
        raise ValueError(
            f"{idle[0]}={getattr(options, idle[0])!r} would do nothing with draft={draft!r}; nearest setting that works: "
            f"{idle[0]}={getattr(defaults, idle[0])!r}"
        )
