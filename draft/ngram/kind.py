"""What the n-gram drafter says of itself; see draft/kind.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specdec.draft.kind import DrafterKind, OpenDrafter

if TYPE_CHECKING:
    from specdec.models.config import ModelConfig


class Ngrams(DrafterKind):
    name = help = "ngram"
    meaning = "without a checkpoint, by this name"
    instead = "which needs no files"
    joins = True
    pays = ("n-gram", "where texts repeat their prompts")

    def open(self, target_folder: Path, target: ModelConfig) -> OpenDrafter:
        from specdec.draft.ngram.drafter import NgramModel

        return OpenDrafter(NgramModel(target.vocab_size))


KIND = Ngrams()
