"""Saves a trained head in one of the layouts that its kind is published in, in bfloat16.

This file knows which layouts there are and what each can say of a head.  It knows no training.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from specdec.draft.block.dflash import DFlashHead
from specdec.draft.eagle.head import Eagle3Head
from specdec.draft.head import DraftHead
from specdec.train.heads import safeailab, speculators


def save(head: DraftHead, folder: Path, layout: str) -> None:
    """Writes config.json and model.safetensors.  layout: one that `layout_fault` allows for the head."""
    from safetensors.torch import save_file

    assert isinstance(head, Eagle3Head | DFlashHead)
    if layout == "safeailab":
        assert isinstance(head, Eagle3Head)
        raw, tensors = safeailab.config_of(head), safeailab.tensors_of(head)
    else:
        raw = speculators.config_of(head, safeailab.rope_keys(head.config.model.rope))
        tensors = speculators.tensors_of(head)
    (folder / "config.json").write_text(json.dumps({**raw, "torch_dtype": "bfloat16"}, indent=1) + "\n")
    stored = {name: each.to(torch.bfloat16) if each.is_floating_point() else each for name, each in tensors.items()}
    stored = {name: each.detach().cpu().contiguous() for name, each in stored.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def layout_fault(layout: str, aux_layers: tuple[int, ...], target_layers: int) -> str:
    """Why heads that read these layers of a target of so many can't be saved in the layout; empty if they can."""
    if layout == "speculators" and max(aux_layers) == target_layers - 1:
        return (
            f"aux_layers: expected layers below {target_layers - 1} for layout={layout}, got {list(aux_layers)}: that layout "
            "has no name for the last layer's output before the final norm"
        )
    return ""
