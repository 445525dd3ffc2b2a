"""Finds the drafter that a caller names: a kind that needs no checkpoint by its name, any other by its folder or hub id."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from specdec.draft.drafter import DraftModel
from specdec.draft.formats.open import HowToRead, open_head
from specdec.draft.load import load_head
from specdec.draft.ngram.drafter import NgramModel
from specdec.models.checkpoints.checkpoint import resolve_folder
from specdec.models.config import ModelConfig
from specdec.models.target import Target
from specdec.options import EngineOptions

WITHOUT_CHECKPOINT: dict[str, Callable[[Target], DraftModel]] = {"ngram": lambda target: NgramModel(target.config.vocab_size)}

HEADS_ONLY = ("draft_format", "draft_pickle", "beyond_trained")  # options that say how a head is read

Load = Callable[[Target, int, torch.device, torch.dtype], DraftModel]


def find_drafter(draft: str | Path | None, options: EngineOptions) -> Load | None:
    """What loads the drafter for a target, given the most positions, the device and the dtype; None for no drafter.

    A folder that is called as a kind is named with its path: "./ngram".  ValueError or TypeError if there is no such drafter,
    or for an option that would do nothing.
    """
    is_name = isinstance(draft, str) and draft in WITHOUT_CHECKPOINT
    if draft is None or is_name:
        refuse_idle(options, draft)
    if draft is None:
        return None
    if is_name:
        make = WITHOUT_CHECKPOINT[str(draft)]
        return lambda target, max_positions, device, dtype: make(target)
    folder = resolve_folder(draft, "draft")
    how = _how(options)
    return lambda target, max_positions, device, dtype: load_head(folder, target, max_positions, device, dtype, how)


def head_config(draft: str | Path | None, options: EngineOptions, target: ModelConfig) -> ModelConfig | None:
    """The config of the head that `find_drafter` would load, from headers alone; None for a drafter without a checkpoint."""
    if draft is None or (isinstance(draft, str) and draft in WITHOUT_CHECKPOINT):
        return None
    return open_head(resolve_folder(draft, "draft"), target, _how(options)).reading.spec.model


def _how(options: EngineOptions) -> HowToRead:
    return HowToRead(options.draft_format, options.draft_pickle, options.beyond_trained == "window")


def refuse_idle(options: EngineOptions, draft: str | Path | None) -> None:
    """ValueError for options that say how a head is read where no head is read."""
    defaults = EngineOptions()
    if idle := [name for name in HEADS_ONLY if getattr(options, name) != getattr(defaults, name)]:
        raise ValueError(
            f"{idle[0]}={getattr(options, idle[0])!r} would do nothing with draft={draft!r}; nearest setting that works: "
            f"{idle[0]}={getattr(defaults, idle[0])!r}"
        )
