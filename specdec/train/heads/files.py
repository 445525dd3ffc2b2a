"""Saves a trained head in one of the layouts that its kind is published in, in bfloat16, or its matrices in fp8.

This file knows which layouts there are and what each can say of a head.  It knows no training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.draft.formats.parts import matrices_of, tensors_of
from specdec.draft.head import DraftHead
from specdec.models.checkpoints.checkpoint import resolve_target
from specdec.models.described import target_json
from specdec.train.heads import safeailab, speculators

FP8, FP8_MAX = torch.float8_e4m3fn, torch.finfo(torch.float8_e4m3fn).max
# As llm-compressor says it: a scale for each row.
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed", "ignore": [],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "input_activations": None, "output_activations": None,
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
        }
    },
}  # fmt: skip


def save(head: DraftHead, folder: Path, layout: str, target: str | Path, dtype: str = "bfloat16") -> None:
    """Writes config.json and model.safetensors.  layout: one that `layout_fault` allows for the head.  target: a folder,
    hub id or GGUF file.  dtype: bfloat16 or fp8, of matrices; all else, embeddings too, is in bfloat16.
    """
    from safetensors.torch import save as to_bytes

    if layout == "safeailab":
        raw, named, has_map = safeailab.config_of(head), safeailab.parts_of(head), True
    else:
        found = target_json(resolve_target(target, "target"))
        verifier = speculators.Verifier(str(target), found.get("architectures") or [])
        raw = speculators.config_of(head, safeailab.rope_keys(head.config.model.rope), verifier)
        named, has_map = speculators.parts_of(head), speculators.has_map(head)
    tensors = {name: each.detach().to(torch.bfloat16) for name, each in tensors_of(named).items()}
    if dtype == "fp8":
        tensors, raw = in_fp8(tensors, [*matrices_of(named)]), raw | {"quantization_config": COMPRESSED}
    tensors |= safeailab.vocabulary_map(head) if has_map else {}
    (folder / "config.json").write_text(json.dumps({**raw, "torch_dtype": "bfloat16"}, indent=1) + "\n")
    stored = {name: each.cpu().contiguous() for name, each in tensors.items()}
    # Not save_file, whose files nobody but their owner may read.
    (folder / "model.safetensors").write_bytes(to_bytes(stored, metadata={"format": "pt"}))


def in_fp8(tensors: Mapping[str, Tensor], matrices: list[str]) -> dict[str, Tensor]:
    """The tensors with these matrices in fp8, with a scale for each row that takes its largest number to fp8's largest."""
    rounded = dict(tensors)
    for name in matrices:
        weight_NK = tensors[f"{name}.weight"].float()
        scale_N1 = (weight_NK.abs().amax(1, keepdim=True) / FP8_MAX).clamp(min=1e-12).to(torch.bfloat16)
        rounded[f"{name}.weight"] = (weight_NK / scale_N1.float()).clamp(-FP8_MAX, FP8_MAX).to(FP8)
        rounded[f"{name}.weight_scale"] = scale_N1
    return rounded


def layout_fault(layout: str, aux_layers: tuple[int, ...], target_layers: int) -> str:
    """Why heads that read these layers of a target of so many can't be saved in the layout; empty if they can."""
    if layout == "speculators" and max(aux_layers) == target_layers - 1:
        return (
            f"aux_layers: expected layers below {target_layers - 1} for layout={layout}, got {list(aux_layers)}: that layout "
            "has no name for the last layer's output before the final norm"
        )
    return ""
