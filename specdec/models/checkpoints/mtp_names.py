"""Layers of multi-token prediction (MTP) that come with a target, after its own layers: how many, and how their names begin.

Targets leave these tensors where they are; a drafter may load them.  This module knows names and no weights.
"""

from __future__ import annotations

from specdec.models.config import ModelConfig

_ERNIE = tuple(f"model.mtp_{part}." for part in ("emb_norm", "hidden_norm", "linear_proj", "block"))
_OWN_PREFIXES = {  # up to the layer's number; elsewhere layers are numbered on from the target's last one
    "mimo": ("model.mtp_layers.",),
    "ernie4_5_moe": _ERNIE,
}


def mtp_prefixes(config: ModelConfig) -> tuple[str, ...]:
    """How the names of all tensors of its MTP layers begin, layer after layer; none if it has no such layers."""
    own = _OWN_PREFIXES.get(config.family)
    numbers = range(config.mtp_layers)
    if own is None:
        return tuple(f"model.layers.{config.num_layers + index}." for index in numbers)
    return tuple(f"{prefix}{index}." for index in numbers for prefix in own)
