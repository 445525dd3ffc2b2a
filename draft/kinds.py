"""Finds the drafter that a caller names: a kind without a folder of its own by its name, any other by its folder or hub id."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from specdec.checks import nearest_name
from specdec.draft.drafter import DraftModel
from specdec.draft.formats.open import HowToRead, OpenHead, open_head
from specdec.draft.load import build_head, empty_head
from specdec.draft.mtp.fill import empty_mtp
from specdec.draft.mtp.layouts import FAMILIES
from specdec.draft.mtp.load import OpenMtp, build_mtp, open_mtp, refusal
from specdec.draft.ngram.drafter import NgramModel
from specdec.models.checkpoints.checkpoint import resolve_folder
from specdec.models.checkpoints.mistaken import refuse_itself
from specdec.models.config import ModelConfig
from specdec.models.target import Target
from specdec.options import EngineOptions

WITHOUT_CHECKPOINT: dict[str, Callable[[int], DraftModel]] = {"ngram": NgramModel}  # from the size of the target's vocabulary
MTP = "mtp"  # the target's own layers, in the target's folder
# What can be named as a draft, and what it is.
NAMES = {
    "ngram": "without a checkpoint, by this name",
    MTP: f"the target's own layers of multi-token prediction, by this name: {', '.join(FAMILIES)}",
}

HEADS_ONLY = ("draft_format", "draft_pickle", "draft_quantize", "beyond_trained")  # options that say how a head is read

Load = Callable[[Target, int, torch.device, torch.dtype], DraftModel]


def is_name(draft: str | Path | None) -> bool:
    """Whether a kind is meant by its name, and no folder."""
    return isinstance(draft, str) and draft in NAMES


def head_folder(draft: str | Path) -> Path:
    """The folder of a head.  ValueError or TypeError if there is none; it names a kind that is spelled alike."""
    if isinstance(draft, bool):
        raise TypeError(f"draft must be a folder, a hub id or the name of a kind, got {draft}; nearest setting: draft=None")
    try:
        return resolve_folder(draft, "draft")
    except ValueError as error:
        if not (meant := nearest_name(str(draft).strip(), [*NAMES, "None"])):
            raise
        raise ValueError(f"{error}; nearest setting that works: draft={None if meant == 'None' else meant!r}") from None


def find_drafter(draft: str | Path | None, options: EngineOptions) -> str | Path | None:
    """The name of a kind, or the folder of a head; None for no drafter.  A hub is asked once, here.

    A folder that is called as a kind is named with its path: "./ngram".  ValueError or TypeError if there is no such drafter,
    or for an option that would do nothing.
    """
    if draft is None or is_name(draft):
        refuse_idle(options, draft)
        return draft
    return head_folder(draft)


class OpenDrafter(NamedTuple):
    """A drafter that is understood and checked against its target, and of which no weight was read.

    model: it without its weights: which trees it grows, and how far it writes.
    load: what makes it with its weights, given the target, the most positions, the device and the dtype.  To be called once.
    files: what its tensors are; None: it has none.
    """

    model: DraftModel
    load: Load
    files: OpenHead | OpenMtp | None = None

    @property
    def configs(self) -> tuple[ModelConfig, ...]:
        """Of what keeps keys and values in the target's pages."""
        if self.files is None:
            return ()
        return ((self.files.spec if isinstance(self.files, OpenMtp) else self.files.reading.spec).model,)


def open_drafter(
    found: str | Path | None, options: EngineOptions, target: ModelConfig, target_folder: Path
) -> OpenDrafter | None:
    """What `find_drafter` found, by its config and headers; None for no drafter."""
    if found is None:
        return None
    if found == MTP:
        mtp = open_mtp(target_folder, target)
        return OpenDrafter(empty_mtp(mtp.spec), partial(build_mtp, mtp), mtp)
    if is_name(found):
        make = WITHOUT_CHECKPOINT[str(found)]
        return OpenDrafter(make(target.vocab_size), lambda model, *_: make(model.config.vocab_size))
    refuse_itself(Path(found), target_folder, lambda: not refusal(target_folder, target))
    head = open_head(Path(found), target, how_to_read(options))
    return OpenDrafter(empty_head(head.reading.spec), partial(build_head, head), head)


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
