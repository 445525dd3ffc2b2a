"""Layers of multi-token prediction (MTP) that come with a target, after its own layers: how many, and how their names begin.

Targets leave these tensors where they are; a drafter may load them.  This module knows names and no weights.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from specdec.models.checkpoints.checkpoint import Checkpoint
from specdec.models.config import ModelConfig
from specdec.models.keys.shared import MTP_COUNT

_ERNIE = tuple(f"model.mtp_{part}." for part in ("emb_norm", "hidden_norm", "linear_proj", "block"))
_OWN_PREFIXES = {  # up to the layer's number; elsewhere layers are numbered on from the target's last one
    "mimo": ("model.mtp_layers.",),
    "ernie4_5_moe": _ERNIE,
    "mimo_v2_flash": ("model.mtp.layers.",),
}
_HYBRIDS = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
_OF_ALL_LAYERS = dict.fromkeys((*_HYBRIDS, "nemotron_h"), "mtp.")  # how names of all their tensors begin
_UNCOUNTED = ("mimo_v2_flash",)  # families whose config need not count the layers
_COUNTS = dict.fromkeys(_HYBRIDS[1:], "mtp_num_hidden_layers")


def count_key(family: str) -> str:
    """The key of a config.json that says how many MTP layers there are."""
    return _COUNTS.get(family, MTP_COUNT)


def mtp_prefixes(config: ModelConfig) -> tuple[str, ...]:
    """How the names of all tensors of its MTP layers begin, layer after layer; none if it has no such layers."""
    if (prefix := _OF_ALL_LAYERS.get(config.family)) is not None:
        return (prefix,) if config.mtp_layers else ()
    own = _OWN_PREFIXES.get(config.family)
    numbers = range(config.mtp_layers)
    if own is None:
        return tuple(f"model.layers.{config.num_layers + index}." for index in numbers)
    return tuple(f"{prefix}{index}." for index in numbers for prefix in own)


def with_mtp_count(config: ModelConfig, folder: Path) -> ModelConfig:
    """The config with the number of MTP layers that the folder holds, of a family whose config need not count them.

    ValueError if the config counts others.  Where there are none, they may have been left out.
    """
    if config.family not in _UNCOUNTED:
        return config
    (prefix,) = _OWN_PREFIXES[config.family]
    names = Checkpoint(folder).names()
    numbers = {name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix)}
    if not numbers:
        return config
    if config.mtp_layers not in (0, len(numbers)):
        raise ValueError(
            f"{folder}: {count_key(config.family)} must be {len(numbers)}, the MTP layers that are there, or absent, "
            f"got {config.mtp_layers}"
        )
    return replace(config, mtp_layers=len(numbers))


def refuse_uncounted(names: Collection[str], config: ModelConfig, where: str) -> None:
    """ValueError if a config of a hybrid counts no MTP layers, and there are some.  where: its file."""
    prefix = _OF_ALL_LAYERS.get(config.family)
    if prefix is None or config.mtp_layers or not (own := sorted(name for name in names if name.startswith(prefix))):
        return
    layers = {name.removeprefix(f"{prefix}layers.").partition(".")[0] for name in own if name.startswith(f"{prefix}layers.")}
    raise ValueError(
        f"{where}: {count_key(config.family)} must say how many MTP layers the checkpoint holds, got 0 (or no such key), and "
        f"{len(own)} tensors like {own[0]!r}; nearest thing that works: {count_key(config.family)} {max(1, len(layers))}"
    )
