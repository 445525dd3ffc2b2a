"""Layers of multi-token prediction (MTP) that come with a target, after its own layers: how many, and how their names begin.

Targets leave these tensors where they are; a drafter may load them.  This module knows names and no weights.
"""

from __future__ import annotations

from specdec.models.config import ModelConfig

_OWN_PREFIXES = {"mimo": "model.mtp_layers."}  # elsewhere they are numbered on from the target's last layer


def mtp_prefix(config: ModelConfig, index: int) -> str:
    """How the names of all tensors of MTP layer number `index` begin.  config: the target's."""
    own = _OWN_PREFIXES.get(config.family)
    return f"{own}{index}." if own else f"model.layers.{config.num_layers + index}."


def mtp_prefixes(config: ModelConfig) -> tuple[str, ...]:
    """The same for all of them; none if the target has no such layers."""
    return tuple(mtp_prefix(config, index) for index in range(config.mtp_layers))
