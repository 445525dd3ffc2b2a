"""YaRN, a scaling of rotary positions to longer contexts (arXiv 2309.00071), with the values that transformers computes.

Dimensions that turn slowly are interpolated to the longer context, dimensions that turn fast stay as they are, and those
between are blended.  YaRN also sharpens attention by a temperature: DeepSeek multiplies the softmax scale (`mscale_all_dim`),
other models multiply cosines and sines.  This is not transformers' own function because that one needs the config object of a
transformers model.  This file knows no model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specdec.models.checkpoints.config_values import flag, number
from specdec.models.config import RopeConfig
from specdec.models.keys.rope import all_rope_keys, parse_rope, rope_type


@dataclass(frozen=True)
class YarnRope(RopeConfig):
    """Rotary settings of a model that uses YaRN.

    beta_fast, beta_slow: dimensions that turn more often than beta_fast over the original context stay as they are; those that
    turn less often than beta_slow are interpolated; those between are blended.
    mscale, mscale_all_dim: DeepSeek's factors on the temperature; 0 stands for a factor that the config does not give.
    amplitude: factor on cosines and sines.
    truncate: whether the ends of the blended range are rounded to whole dimensions.
    """

    kind: str = "yarn"
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    amplitude: float = 1.0
    truncate: bool = True

    @property
    def scale_factor(self) -> float:
        """The factor that DeepSeek puts on the softmax scale; 1 where the config does not give mscale_all_dim."""
        return temperature(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


def temperature(factor: float, mscale: float = 1.0) -> float:
    """Factor on cosines and sines for a context `factor` times as long: the paper's sqrt(1/t), where mscale is 1."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


_NUMBERS = {
    "rope_theta": "theta",
    "factor": "factor",
    "original_max_position_embeddings": "original_max_position",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "attention_factor": "amplitude",
}
_KNOWN = {*_NUMBERS, "rope_type", "type", "truncate", "partial_rotary_factor"}


def parse_rope_with_yarn(raw: dict[str, Any], where: str) -> RopeConfig:
    """The rotary settings in a config.json, of type yarn or of any type that `parse_rope` knows.

    raw: the whole config.  where: the config's name for error messages.  ValueError for unknown, missing or malformed keys.
    """
    merged = all_rope_keys(raw, where)
    if rope_type(merged, where) != "yarn":
        return parse_rope(raw, where)
    if unknown := sorted(set(merged) - _KNOWN):
        raise ValueError(
            f"{where}: unknown rope keys {', '.join(unknown)} in rope_parameters or rope_scaling; they may change the model"
        )
    if missing := [key for key in ("factor", "original_max_position_embeddings") if merged.get(key) is None]:
        raise ValueError(f"{where}: rope type 'yarn' needs {', '.join(missing)} in rope_parameters (or rope_scaling)")
    given = [key for key in _NUMBERS if merged.get(key) is not None or (key in merged and key == "rope_theta")]
    numbers: dict[str, Any] = {_NUMBERS[key]: number(merged, key, where, or_zero=key.startswith("mscale")) for key in given}
    if numbers.get("theta", RopeConfig.theta) <= 1:  # the blend's ends are logarithms to this base
        raise ValueError(f"{where}: rope_theta must be above 1 for rope type 'yarn', got {merged['rope_theta']!r}")
    rope = YarnRope(**numbers, truncate=flag(merged, "truncate", where, True))
    if "amplitude" in numbers:
        return rope
    if not (rope.mscale and rope.mscale_all_dim):
        return replace(rope, amplitude=temperature(rope.factor))
    return replace(rope, amplitude=temperature(rope.factor, rope.mscale) / temperature(rope.factor, rope.mscale_all_dim))


def yarn_frequencies(rope: YarnRope, head_dim: int, device: torch.device) -> Tensor:
    """Angles per position in radians, [head_dim / 2] float32.  head_dim: how many values of a head are rotated."""

    def dimension(rotations: float) -> float:
        """The dimension (not whole) that turns this often over the original context."""
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001  # transformers' value; it keeps the division below defined
    slowed = ((torch.arange(head_dim // 2, dtype=torch.float32, device=device) - low) / width).clamp(0, 1)
    wavelengths = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64, device=device).float() / head_dim)
    return slowed / (rope.factor * wavelengths) + (1 - slowed) / wavelengths
