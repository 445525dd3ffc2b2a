"""Notices a draft head where a target is expected, and a whole model where a head is: the likeliest mistake of a command line.

Knows the marks of both, in config keys and tensor names, and nothing that would load them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

_HEAD_KEYS = ("draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids", "speculators_model_type")
_HEAD_TENSORS = ("fc.weight", "fusion_fc.weight", "d2t")  # no target has them at its top
_MTP = (".hnorm.", ".mtp_layers.")  # in the names of MTP layers
_TARGET_PREFIXES = ("model.embed_tokens.", "model.layers.", "transformer.", "gpt_neox.")


def refuse_head_config(raw: dict[str, Any], path: Path) -> None:
    """ValueError if a config.json given for a target says that it is a draft head's."""
    marks = [key for key in _HEAD_KEYS if raw.get(key) is not None]
    if raw.get("model_type") == "llama" and "bias" in raw:  # a key of EAGLE-1 heads, and of no Llama
        marks.append("bias")
    if any("eagle" in str(name).lower() for name in _as_list(raw.get("architectures"))):
        marks.append(f"architectures {raw['architectures']}")
    if marks:
        raise ValueError(f"{path}: expected a target, got a draft head's config ({marks[0]}); are target and draft swapped?")


def refuse_head_tensors(names: Iterable[str], folder: Path) -> None:
    """ValueError if the weights of a target are a draft head's: heads of EAGLE-1 have a plain Llama's config."""
    held = set(names)
    marks = [name for name in _HEAD_TENSORS if name in held]
    if marks and not any(name.startswith(_TARGET_PREFIXES) for name in held):
        raise ValueError(f"{folder}: expected a target, got a draft head's weights ({marks[0]}); are target and draft swapped?")


def refuse_target_tensors(names: Iterable[str], folder: Path) -> None:
    """ValueError if the weights of a draft head are a whole model's."""
    held = set(names)
    marks = [name for name in sorted(held) if name.startswith(_TARGET_PREFIXES)]
    if marks and not held & set(_HEAD_TENSORS):
        own = (
            " (a target's own MTP layers are named draft='mtp')" if any(part in name for name in held for part in _MTP) else ""
        )
        raise ValueError(
            f"{folder}: expected a draft head, got a whole model's weights ({marks[0]}); are target and draft swapped?{own}"
        )


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
