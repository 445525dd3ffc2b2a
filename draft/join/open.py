"""A drafter that is joined by other sources, before its weights are read; see draft/kind.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.draft.drafter import DraftModel
from specdec.draft.join.drafter import JoinedModel
from specdec.draft.join.source import PathSource
from specdec.draft.kind import OpenDrafter
from specdec.draft.model.translation import Translation
from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.target import Target


class OpenJoined(OpenDrafter):
    """own: the drafter, of which all files are."""

    def __init__(self, own: OpenDrafter, sources: Sequence[PathSource]) -> None:
        super().__init__(JoinedModel(own.model, sources))
        self.sources = sources
        self.own, self.checkpoint, self.is_apart, self.own_text = own, own.checkpoint, own.is_apart, own.own_text

    def load(self, target: Target, max_positions: int, device: torch.device, dtype: torch.dtype) -> DraftModel:
        model = JoinedModel(self.own.load(target, max_positions, device, dtype), self.sources)
        for source in self.sources:
            source.load(device)
        return model

    def unkept(self, target: Checkpoint) -> set[str]:
        return self.own.unkept(target)

    def translate(self, words: Translation) -> None:
        self.own.translate(words)
        self.model = JoinedModel(self.own.model, self.sources)

    @property
    def added_values(self) -> int:
        return self.own.added_values
