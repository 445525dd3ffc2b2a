"""What a target's own MTP layers say of themselves as a drafter; see draft/kind.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specdec.draft.kind import DrafterKind, OpenDrafter

if TYPE_CHECKING:
    from specdec.models.config import ModelConfig


class MtpLayers(DrafterKind):
    name = "mtp"
    help = "mtp (its own MTP layers)"
    has_files = True
    instead = "its own MTP layers"

    @property
    def meaning(self) -> str:
        from specdec.draft.mtp.layouts import FAMILIES

        return f"the target's own layers of multi-token prediction, by this name: {', '.join(FAMILIES)}"

    def open(self, target_folder: Path, target: ModelConfig) -> OpenDrafter:
        from specdec.draft.mtp.load import OpenMtp

        return OpenMtp(target_folder, target)

    def refusal(self, target_folder: Path, target: ModelConfig) -> str:
        if not target.mtp_layers:
            return "the checkpoint has no such layers"
        try:
            self.open(target_folder, target)
        except ValueError as error:
            return str(error)
        return ""

    def offer(self, target: ModelConfig) -> str:
        return f"yes, {target.mtp_layers} of its own layers"


KIND = MtpLayers()
