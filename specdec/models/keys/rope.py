"""The keys of a config.json that say how positions turn heads, in the words of transformers 4 and of transformers 5.

YaRN's own are read by `yarn.py`.
"""

from __future__ import annotations

from typing import Any

from specdec.models.checkpoints.config_values import NotComputedHere, mapping, number
from specdec.models.config import RopeConfig


def rope_keys(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """rope_parameters, or the older rope_scaling.  ValueError if both are there and say different things.

    transformers takes rope_scaling alone then, and its class's own rope_theta where it has none, whatever rope_parameters say:
    a rope_scaling that is added to a folder of transformers 5 gives a model that nobody trained.
    """
    parameters, scaling = (mapping(raw, key, where) for key in ("rope_parameters", "rope_scaling"))
    if not parameters or not scaling:
        return parameters or scaling
    one, other = (
        {"rope_type" if key == "type" else key: value for key, value in said.items() if value is not None}
        for said in (parameters, {"rope_theta": raw.get("rope_theta"), **scaling})
    )
    if {"rope_theta": raw.get("rope_theta"), **one} != {"rope_theta": None, **other}:
        raise ValueError(
            f"{where}: rope_parameters and rope_scaling must say the same where both are there, rope_theta included, got "
            f"{parameters} and {scaling}; nearest thing that works: all of it in rope_parameters, and no rope_scaling"
        )
    return parameters


def all_rope_keys(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """As `rope_keys`, with rope_theta and partial_rotary_factor that stand beside them, where they don't say these themselves.

    NotComputedHere if only a part of each head is turned.
    """
    outside = {key: number(raw, key, where) for key in ("rope_theta", "partial_rotary_factor") if raw.get(key) is not None}
    merged = {**outside, **rope_keys(raw, where)}
    if merged.get("partial_rotary_factor") is not None and number(merged, "partial_rotary_factor", where) != 1.0:
        raise NotComputedHere(
            f"{where}: partial_rotary_factor must be absent or 1: no native module turns only a part of each head yet"
        )
    return merged


MROPE = ("mrope_section", "mrope_interleaved")  # which of three positions turns which pairs: in a text all three are one


def without_mrope(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """The config without keys that change nothing in texts; with sections of positions, the type "mrope" is the usual one."""
    rope = {key: mapping(raw, key, where) for key in ("rope_parameters", "rope_scaling") if raw.get(key) is not None}
    plain: dict[str, Any] = {}
    for key, said in rope.items():
        sections, usual = said.get(MROPE[0]), {}
        if sections is not None:
            counts = sections if isinstance(sections, list) and len(sections) == 3 else [-1]
            if any(type(each) is not int or each < 0 for each in counts):
                raise ValueError(f"{where}: {key}: {MROPE[0]} must be three numbers of pairs, got {sections!r}"[:500])
            usual = {name: "default" for name in ("rope_type", "type") if said.get(name) == "mrope"}
        plain[key] = {name: x for name, x in {**said, **usual}.items() if name not in MROPE}
    return {**raw, **plain}


def rope_type(merged: dict[str, Any], where: str) -> str:
    """By its name of today or the older one."""
    kind = merged.get("rope_type", merged.get("type", "default"))
    if not isinstance(kind, str):
        raise ValueError(f"{where}: rope_type must be a string, got {kind!r}")
    return kind


_ROPE_KEYS = {  # what each type needs: the config's key, our name
    "default": {},
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position_embeddings": "original_max_position",
    },
}
_ROPE_KNOWN = {"rope_theta", "rope_type", "type", "partial_rotary_factor", *_ROPE_KEYS["llama3"]}


def parse_rope(raw: dict[str, Any], where: str = "config.json") -> RopeConfig:
    """Rope settings as transformers 4 (`rope_theta`, `rope_scaling`) or 5 (`rope_parameters`) writes them."""
    merged = all_rope_keys(raw, where)
    kind = rope_type(merged, where)
    if kind not in _ROPE_KEYS:
        raise NotComputedHere(
            f"{where}: rope type must be default, linear or llama3, got {kind!r} (rope_type): no native module computes it yet"
        )
    if unknown := sorted(set(merged) - _ROPE_KNOWN):
        raise ValueError(
            f"{where}: unknown rope keys {', '.join(unknown)} in rope_parameters or rope_scaling; they may change the model"
        )
    wanted = _ROPE_KEYS[kind]
    missing = [key for key in wanted if merged.get(key) is None]
    if missing:
        raise ValueError(f"{where}: rope type {kind!r} needs {', '.join(missing)} in rope_parameters (or rope_scaling)")
    numbers: dict[str, Any] = {name: number(merged, key, where) for key, name in wanted.items()}
    if kind == "llama3" and numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
        raise ValueError(
            f"{where}: high_freq_factor must be above low_freq_factor, got {numbers['high_freq_factor']:g} and "
            f"{numbers['low_freq_factor']:g}"
        )
    return RopeConfig(theta=number(merged, "rope_theta", where, RopeConfig.theta), kind=kind, **numbers)
