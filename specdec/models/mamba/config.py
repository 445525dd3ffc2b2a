"""What a target with Mamba-2 layers says of them besides their sizes, and the keys of a config.json that families share.

This module knows no weights and no family.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from specdec.models.checkpoints.config_values import NotComputedHere, flag, whole
from specdec.models.config import ModelConfig
from specdec.models.recurrent.sizes import RecurrentConfig, RuleSizes
from specdec.ops.recurrent.gates.gated_norm import MAMBA, NormForm

LIMIT = "time_step_limit"
KEYS = (
    f"mamba_chunk_size mamba_conv_bias mamba_d_conv mamba_d_head mamba_d_state mamba_expand mamba_n_groups mamba_n_heads "
    f"mamba_proj_bias {LIMIT}"
)
# What transformers' classes mean by sizes that a config does not say.
_SIZES = {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_d_state": 256}


@dataclass(frozen=True)
class MambaConfig(ModelConfig):
    """A decoder of which some layers are Mamba-2's.

    conv_bias, in_bias, out_bias: whether the convolution and the two projections have biases.
    gated_norm: the norm of each group before the output projection; None: a gate alone.
    """

    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    gated_norm: NormForm | None = MAMBA


def read_mamba(raw: dict[str, Any], where: str, outputs: int | None = None) -> tuple[RecurrentConfig, dict[str, bool]]:
    """(what the layers keep, their conv_bias and in_bias), by keys that begin with mamba_.

    outputs: of all heads together; None: mamba_expand times hidden_size.
    ValueError names `where` (the file), the key, what was expected and what was found.
    """
    refuse_limits(raw, where)
    expanded = whole(raw, "mamba_expand", where, 2) * whole(raw, "hidden_size", where)
    total, said = (expanded, "mamba_expand x hidden_size") if outputs is None else (outputs, "mamba_d_ssm")
    heads, groups, taps, state = (whole(raw, key, where, size) for key, size in _SIZES.items())
    width = total // heads if raw.get("mamba_d_head") in (None, "auto") else whole(raw, "mamba_d_head", where)
    if heads * width != total:
        raise ValueError(
            f"{where}: mamba_n_heads x mamba_d_head must be {said}, {total}, got {heads} x {width}; nearest thing that works: "
            "mamba_n_heads that divides it, and mamba_d_head 'auto'"
        )
    whole(raw, "mamba_chunk_size", where, 256)  # not read: chunks change rounding alone
    biases = {"conv_bias": flag(raw, "mamba_conv_bias", where, True), "in_bias": flag(raw, "mamba_proj_bias", where)}
    return sizes_of(where, taps, groups, heads, state, width, ("mamba_n_heads", "mamba_n_groups", "mamba_d_conv")), biases


def sizes_of(
    where: str, taps: int, groups: int, heads: int, state: int, width: int, keys: tuple[str, str, str]
) -> RecurrentConfig:
    """The sizes as a recurrent layer's.  keys: those that say heads, groups and taps, for errors."""
    if heads % groups:
        raise ValueError(f"{where}: {keys[0]} must be a multiple of {keys[1]}, got {heads}, {groups}")
    if taps < 2:
        raise ValueError(f"{where}: {keys[2]} must be at least 2, got {taps}")
    return RecurrentConfig(taps, RuleSizes(groups, heads, state, width))


def refuse_limits(raw: dict[str, Any], where: str) -> None:
    """ValueError for bounds of steps other than 0 and infinity, however infinity is written."""
    value = [0.0, math.inf] if raw.get(LIMIT) is None else raw[LIMIT]
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(f"{where}: {LIMIT} must be null or a list of two numbers, got {value!r}"[:500])
    least, most = (each.get("__float__") if isinstance(each, dict) else each for each in value)
    if least != 0 or isinstance(least, bool) or most not in (math.inf, "Infinity"):
        raise NotComputedHere(
            f"{where}: {LIMIT} must be 0 and infinity, got {value!r}: steps are never cut; nearest thing that works: no {LIMIT}"
        )
