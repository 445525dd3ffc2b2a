"""The config.json of DiffLlama models (differential attention), read strictly.  This module knows no weights."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from specdec.attention.kinds import LayerKind
from specdec.models.checkpoints.config_values import MAX_INTEGER, number
from specdec.models.config import ModelConfig
from specdec.models.kv_source import KEY, parse_kv_source
from specdec.models.llama.config import parse_llama

# Keys of our own: no other library computes these options.
WINDOWS, SOFTCAP, ALIBI = "attention_windows", "attention_softcap", "attention_alibi"
_ALIBI = ("linear", "sqrt")
_ROPE = ("rope_parameters", "rope_scaling", "rope_theta")
# Keys of a Llama that transformers' DiffLlama ignores: a value that would change a Llama must not pass.
_IGNORED = ("sliding_window", "layer_types", "use_sliding_window", "mlp_bias")


def lambda_init(layer: int) -> float:
    """The constant part of a layer's lambda (arXiv 2410.05258, section 2.1).  layer: counted from 0."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


def parse_diffllama(raw: dict[str, Any], where: str) -> ModelConfig:
    """A Llama's config, whose counts of heads are those of the checkpoint.

    ValueError names `where` (the file), the key, what was expected and what was found.
    """
    for key in _IGNORED:
        if raw.get(key) not in (None, False):
            raise ValueError(f"{where}: {key} must be absent, null or false in a diffllama model, got {raw[key]!r}")
    if raw.get("attention_dropout") not in (None, 0, 0.0):
        raise ValueError(f"{where}: attention_dropout must be 0 in a diffllama model, got {raw['attention_dropout']!r}")
    if raw.get("lambda_std_dev") is not None:  # how a fresh model's weights are drawn
        number(raw, "lambda_std_dev", where, or_zero=True)
    own = (*_IGNORED, "lambda_std_dev", KEY, WINDOWS, SOFTCAP, ALIBI)
    llama = {key: value for key, value in raw.items() if key not in own}
    base = parse_llama({"rms_norm_eps": 1e-5, **llama, "model_type": "llama"}, where)
    if base.num_kv_heads % 2:
        raise ValueError(
            f"{where}: num_key_value_heads must be even, because differential attention pairs heads; got {base.num_kv_heads}"
        )
    kinds = _layer_kinds(raw, base.num_layers, where)
    return replace(
        base, family=raw["model_type"], differential=True, layer_kinds=kinds, kv_source=parse_kv_source(raw, kinds, where),
        softcap=None if raw.get(SOFTCAP) is None else number(raw, SOFTCAP, where), sqrt_alibi=raw.get(ALIBI) == "sqrt",
    )  # fmt: skip


def _layer_kinds(raw: dict[str, Any], count: int, where: str) -> tuple[LayerKind, ...]:
    """Which keys each layer reads, from the config's list of windows, such as [null, 8, 8, null], and whether by ALiBi."""
    windows, alibi = raw.get(WINDOWS), _has_alibi(raw, where)
    if windows is None:
        return (LayerKind(alibi=alibi),) * count
    are_windows = isinstance(windows, list) and all(
        each is None or (type(each) is int and 0 < each <= MAX_INTEGER) for each in windows
    )
    if not are_windows or len(windows) != count:
        raise ValueError(
            f"{where}: {WINDOWS} must be null or a list of {count} entries, one a layer, each a positive number of tokens or "
            f"null, got {windows!r}"
        )
    return tuple(LayerKind(window=window, alibi=alibi) for window in windows)


def _has_alibi(raw: dict[str, Any], where: str) -> bool:
    """Whether distances take the place of rotary positions."""
    alibi = raw.get(ALIBI)
    if alibi is None:
        return False
    if alibi not in _ALIBI:
        raise ValueError(f"{where}: {ALIBI} must be null or one of {', '.join(_ALIBI)}, got {alibi!r}")
    if said := [key for key in _ROPE if raw.get(key) is not None]:
        raise ValueError(f"{where}: {', '.join(said)} must be absent or null with {ALIBI}, which has no rotary positions")
    return True
