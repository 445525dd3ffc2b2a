"""What a small model says of itself as a drafter; see draft/kind.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specdec.draft.kind import FolderKind, OpenDrafter

if TYPE_CHECKING:
    from specdec.models.config import ModelConfig
    from specdec.options import EngineOptions


class SmallModels(FolderKind):
    name = "model"
    title = "a small model's folder"
    meaning = "a causal language model, of the target's tokens or of others, by its folder, hub id or GGUF file"

    def knows(self, place: Path, options: EngineOptions) -> bool:
        from specdec.draft.model.load import is_model

        return options.draft_format == "auto" and is_model(place, options)

    def open(self, place: Path, options: EngineOptions, target_folder: Path, target: ModelConfig) -> OpenDrafter:
        from specdec.draft.model.load import OpenSmallModel

        return OpenSmallModel(place, options, target)

    def offer(self, target: ModelConfig) -> str:
        from specdec.draft.model.load import refusal_by_target

        why = refusal_by_target(target)
        return f"no: {why}" if why else f"one with a tokenizer, best of the target's {target.vocab_size} tokens"


KIND = SmallModels()
