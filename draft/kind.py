"""What a kind of drafter says of itself to those who name, find, load and describe drafters.

A kind is declared in its own folder and listed in `kinds.py`; nobody else knows it by name.  This file imports no torch, so
that `--help` can ask the kinds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from specdec.draft.drafter import DraftModel
    from specdec.draft.model.translation import Translation
    from specdec.models.checkpoints.checkpoint import Checkpoint
    from specdec.models.config import ModelConfig
    from specdec.models.target import Target
    from specdec.options import EngineOptions


SUFFIX = "suffix"  # how a list of sources spells matches in the request's own text
CORPUS, ANSWERS = "corpus", "answers"  # and matches in texts that the user names, and in earlier answers
PREDICTION = "prediction"  # what a request's own prediction is called as a source, and the need of rounds with one
Draft = str | Path | Sequence[str | Path] | None  # how a caller names a drafter, or several sources


def spelled(draft: Draft) -> str | None:
    """A drafter or several sources in one line; None for no drafter."""
    return None if draft is None else str(draft) if isinstance(draft, str | Path) else " + ".join(map(str, draft))


class DrafterKind(ABC):
    """A kind that is named as it is spelled: draft="name".

    name: how it is spelled.  help: the same in the help of `--draft`, with what it is where the name alone does not tell.
    has_files: whether it reads weights; if not, there is nothing to inspect or to tune.
    instead: what makes it a choice, said where another drafter can't be taken.
    joins: whether what joins several sources wherever there are some, as requests' predictions, joins it alone too.
    pays: where it pays, said where it was slower than plain decoding: (what its chains and trees are called, where they pay).
    """

    name: str
    help: str
    has_files = joins = False
    instead: str
    pays: tuple[str, str] | None = None

    @property
    @abstractmethod
    def meaning(self) -> str:
        """What it is, for `specdec doctor`."""

    @abstractmethod
    def open(self, target_folder: Path, target: ModelConfig) -> OpenDrafter:
        """It for a target, by config and headers.  ValueError if it can't draft for that target."""

    def refusal(self, target_folder: Path, target: ModelConfig) -> str:
        """Why it can't draft for the target; empty: it can."""
        return ""

    def offer(self, target: ModelConfig) -> str:
        """What it is for a target that it can draft for, for `specdec inspect`."""
        return "yes"


class FolderKind(ABC):
    """A kind that is named by where its files are, and told by them: draft=DIR.

    name: what it is called where it is described.  title: the same with an article, of its files.
    """

    name: str
    title: str

    @property
    @abstractmethod
    def meaning(self) -> str:
        """What it is, for `specdec doctor`."""

    @abstractmethod
    def knows(self, place: Path, options: EngineOptions) -> bool:
        """Whether the files of a folder, or a file, are of this kind, if these options leave that open."""

    @abstractmethod
    def open(self, place: Path, options: EngineOptions, target_folder: Path, target: ModelConfig) -> OpenDrafter:
        """It for a target, by config and headers.  ValueError if it can't draft for that target, or as the options say."""

    @abstractmethod
    def offer(self, target: ModelConfig) -> str:
        """Which files draft for the target, for `specdec inspect`: "no: " and why, if none do."""


class Facts(NamedTuple):
    """What files hold of a drafter, for `specdec inspect`.

    format: the layout's name.  published_by: who publishes drafters in that layout.
    head: the drafter in our own terms.  meanings: what keys were taken to mean.
    tensors: the tensors that are read, with their shapes.  beside: other tensors, and what is made of them.
    """

    format: str
    published_by: str
    head: dict[str, object]
    meanings: dict[str, str]
    tensors: dict[str, list[int]]
    beside: dict[str, str]


class OpenDrafter:
    """A drafter that is understood and checked against its target, without its weights.  Kinds with files extend it.

    model: it without its weights: which trees it grows, what it needs, and how far it writes.
    checkpoint: what its tensors are; None: it has none.
    is_apart: whether these files are its own, and not its target's.
    called: what it is, where its memory or its weights are spoken of.
    own_text: where the tokenizer of its own is; None: it has none, and its tokens are the target's.
    """

    checkpoint: Checkpoint | None = None
    is_apart = False
    called = "draft head"
    own_text: Path | None = None

    def __init__(self, model: DraftModel) -> None:
        self.model = model

    def load(self, target: Target, max_positions: int, device: torch.device, dtype: torch.dtype) -> DraftModel:
        """It with its weights.  max_positions: length of its rotary table.  To be called once."""
        return self.model

    def translate(self, words: Translation) -> None:
        """Has it read and draft its target's tokens by the text behind them.  Asked of those with a text of their own alone."""
        raise NotImplementedError

    def unkept(self, target: Checkpoint) -> set[str]:
        """The checkpoint's tensors that take no memory once it is loaded beside the target."""
        return set()

    @property
    def stored_as(self) -> str:
        """How its weights are stored, in words; empty: it has none."""
        return ""

    @property
    def added_values(self) -> int:
        """How many numbers it keeps in memory that are none of its tensors'."""
        return 0

    def facts(self) -> Facts:
        """What its files hold; asked of drafters with files alone."""
        raise NotImplementedError
