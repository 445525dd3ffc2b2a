"""Families whose checkpoints call embeddings, norms or layers otherwise than all others: what their names become.

Every reader here knows `model.embed_tokens`, `model.norm`, and `model.layers` with an `input_layernorm` each.  Names of what is
within a layer stay the file's own.  This file knows no weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

Tensor = TypeVar("Tensor")

# By model_type: expressions for how names begin, and what that becomes.  The first that fits counts.
RENAMED: dict[str, tuple[tuple[str, str], ...]] = {
    "nemotron_h": (
        (r"(backbone|model)\.embeddings\.", "model.embed_tokens."),
        (r"(backbone|model)\.norm_f\.", "model.norm."),
        (r"(backbone|model)\.layers\.(\d+)\.norm\.", r"model.layers.\2.input_layernorm."),
        (r"backbone\.", "model."),
    ),
}


def by_own_tensor_names(stored: Mapping[str, Tensor], family: str) -> dict[str, Tensor]:
    """The tensors under the names that readers know.  ValueError if two of them are one."""
    rules = [(re.compile(begin), own) for begin, own in RENAMED.get(family, ())]
    named: dict[str, Tensor] = {}
    files: dict[str, str] = {}
    for name, tensor in stored.items():
        fits = ((rule, own) for rule, own in rules if rule.match(name))
        rule, own = next(fits, (None, ""))
        ours = name if rule is None else rule.sub(own, name, count=1)
        if ours in named:
            raise ValueError(f"tensors {files[ours]!r} and {name!r} are one in this model; expected each once")
        named[ours], files[ours] = tensor, name
    return named
