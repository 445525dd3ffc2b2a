"""What an assistant says of itself as a drafter; see draft/kind.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specdec.draft.kind import FolderKind, OpenDrafter

if TYPE_CHECKING:
    from specdec.models.config import ModelConfig
    from specdec.options import EngineOptions


class Assistants(FolderKind):
    name = "assistant"
    title = "a Gemma 4 assistant's folder"
    meaning = "Gemma 4's assistants (gemma4_assistant), whose layers read the target's own keys and values"

    def knows(self, place: Path, options: EngineOptions) -> bool:
        from specdec.draft.assistant.load import is_assistant

        return options.draft_format == "auto" and is_assistant(place)

    def open(self, place: Path, options: EngineOptions, target_folder: Path, target: ModelConfig) -> OpenDrafter:
        from specdec.draft.assistant.load import OpenAssistant

        return OpenAssistant(place, options, target)

    def offer(self, target: ModelConfig) -> str:
        from specdec.draft.assistant.config import refusal_by_target

        why = refusal_by_target(target)
        return f"no: {why}" if why else f"one of backbone_hidden_size {target.hidden_size} and {target.vocab_size} tokens"


KIND = Assistants()
