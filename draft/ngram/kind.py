"""What the n-gram drafter says of itself; see draft/kind.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specdec.draft.kind import DrafterKind, OpenDrafter

if TYPE_CHECKING:
    import torch

    from specdec.draft.drafter import DraftModel
    from specdec.models.config import ModelConfig
    from specdec.models.target import Target


class OpenNgrams(OpenDrafter):
    def __init__(self, target: ModelConfig) -> None:
        from specdec.draft.ngram.drafter import NgramModel

        self.model = NgramModel(target.vocab_size)

    def load(self, target: Target, max_positions: int, device: torch.device, dtype: torch.dtype) -> DraftModel:
        return self.model


class Ngrams(DrafterKind):
    name = help = "ngram"
    has_files = False
    instead = "which needs no files"
    pays = ("n-gram", "where texts repeat their prompts")

    def meaning(self) -> str:
        return "without a checkpoint, by this name"

    def open(self, target_folder: Path, target: ModelConfig) -> OpenDrafter:
        return OpenNgrams(target)


KIND = Ngrams()
