"""Saves a trained head in one of the layouts that its kind is published in, in bfloat16.

This file knows which layouts there are and what each can say of a head.  It knows no training.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from specdec.draft.head import DraftHead
from specdec.models.checkpoints.checkpoint import resolve_target
from specdec.models.described import target_json
from specdec.train.heads import safeailab, speculators


def save(head: DraftHead, folder: Path, layout: str, target: str | Path) -> None:
    """Writes config.json and model.safetensors.  layout: one that `layout_fault` allows for the head.  target: a folder,
    hub id or GGUF file.
    """
    from safetensors.torch import save as to_bytes

    if layout == "safeailab":
        raw, tensors = safeailab.config_of(head), safeailab.tensors_of(head)
    else:
        found = target_json(resolve_target(target, "target"))
        verifier = speculators.Verifier(str(target), found.get("architectures") or [])
        raw = speculators.config_of(head, safeailab.rope_keys(head.config.model.rope), verifier)
        tensors = speculators.tensors_of(head)
    (folder / "config.json").write_text(json.dumps({**raw, "torch_dtype": "bfloat16"}, indent=1) + "\n")
    stored = {name: each.to(torch.bfloat16) if each.is_floating_point() else each for name, each in tensors.items()}
    stored = {name: each.detach().cpu().contiguous() for name, each in stored.items()}
    # Not save_file, whose files nobody but their owner may read.
    (folder / "model.safetensors").write_bytes(to_bytes(stored, metadata={"format": "pt"}))


def layout_fault(layout: str, aux_layers: tuple[int, ...], target_layers: int) -> str:
    """Why heads that read these layers of a target of so many can't be saved in the layout; empty if they can."""
    if layout == "speculators" and max(aux_layers) == target_layers - 1:
        return (
            f"aux_layers: expected layers below {target_layers - 1} for layout={layout}, got {list(aux_layers)}: that layout "
            "has no name for the last layer's output before the final norm"
        )
    return ""
