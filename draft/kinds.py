"""Finds the drafter that a caller names: a kind that needs no checkpoint by its name, any other by its folder or hub id."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from specdec.draft.drafter import DraftModel
from specdec.draft.eagle.load import load_head
from specdec.draft.ngram.drafter import NgramModel
from specdec.models.checkpoints.checkpoint import resolve_folder
from specdec.models.target import Target

WITHOUT_CHECKPOINT: dict[str, Callable[[Target], DraftModel]] = {"ngram": lambda target: NgramModel(target.config.vocab_size)}

Load = Callable[[Target, int, torch.device, torch.dtype], DraftModel]


def find_drafter(draft: str | Path) -> Load:
    """What loads the drafter for a target, given the most positions, the device and the dtype.

    A folder that is called as a kind is named with its path: "./ngram".  ValueError or TypeError if there is no such drafter.
    """
    if isinstance(draft, str) and draft in WITHOUT_CHECKPOINT:
        make = WITHOUT_CHECKPOINT[draft]
        return lambda target, max_positions, device, dtype: make(target)
    folder = resolve_folder(draft, "draft")
    return lambda target, max_positions, device, dtype: load_head(folder, target, max_positions, device, dtype)
