"""Reads single values of a config.json, and refuses those that are of another kind than the key's.

Every function takes the object, the key, and `where` (the file) for its error.  Knows no model.
"""

from __future__ import annotations

import sys
from typing import Any

DTYPE_NAMES = ("float32", "float16", "bfloat16", "float64")
# The largest sizes that are believed.  Beyond them a config would be computed from for hours, or take all memory.
MAX_INTEGER, MAX_LAYERS, MAX_POSITIONS = 2**31 - 1, 4096, 2**24


class NotComputedHere(ValueError):
    """A sound config of a model that our own modules don't compute; transformers' code may.  A malformed one is no such."""


def whole(
    raw: dict[str, Any], key: str, where: str, default: int | None = None, least: int = 1, most: int = MAX_INTEGER
) -> int:
    """A whole number from `least` to `most`.  default: where it is absent or null; None: then it is an error."""
    value = default if raw.get(key) is None else raw[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{where}: {key} must be a whole number of at least {least}, got {value!r}")
    if value > most:
        raise ValueError(f"{where}: {key} must be at most {most}, got {shown(value)}")
    return value


def shown(value: int) -> str:
    """A number for an error, shortened where nobody would count its digits."""
    return str(value) if abs(value) < 10**24 else f"a number of {value.bit_length()} bits"


def number(raw: dict[str, Any], key: str, where: str, default: float | None = None, or_zero: bool = False) -> float:
    """A finite number above zero, or zero too.  default: where it is absent; null is an error."""
    value = raw.get(key, default)
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value <= sys.float_info.max:
        if value > 0 or (or_zero and value == 0):
            return float(value)
    raise ValueError(f"{where}: {key} must be a finite number {'of at least' if or_zero else 'above'} 0, got {value!r}")


def flag(raw: dict[str, Any], key: str, where: str, default: bool = False) -> bool:
    """True or false, null for false where that is the default; keeps out "no", which Python takes for true."""
    value = raw.get(key, default)
    if value is None and not default:
        return False
    if not isinstance(value, bool):
        raise ValueError(f"{where}: {key} must be true or false, got {value!r}")
    return value


def text(raw: dict[str, Any], key: str, where: str) -> str | None:
    value = raw.get(key)
    if value is not None and not isinstance(value, str):
        raise ValueError(f"{where}: {key} must be a string or null, got {value!r}")
    return value


def one_line(error: Exception) -> str:
    """What a library's error says, which may be a page long, for the end of our own line."""
    words = " ".join(str(error).split()) or type(error).__name__
    return words if len(words) <= 300 else f"{words[:300]} ..."


def dtype_name(raw: dict[str, Any], where: str) -> str | None:
    """Of the weights, by its key of today or the older one; None where neither says."""
    for key in ("dtype", "torch_dtype"):
        value = text(raw, key, where)
        if value is not None and value not in DTYPE_NAMES:
            raise ValueError(f"{where}: {key} must be null or one of {', '.join(DTYPE_NAMES)}, got {value!r}")
    return raw.get("dtype") or raw.get("torch_dtype")


def mapping(raw: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    """An object; an empty one where it is absent."""
    value = {} if raw.get(key) is None else raw[key]
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {key} must be an object of keys and values, got {value!r}")
    return value


def token_ids(raw: dict[str, Any], key: str, where: str, vocab_size: int) -> tuple[int, ...]:
    """Token ids that Hugging Face writes as nothing, one number or a list."""
    value = raw.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < vocab_size for i in ids):
        raise ValueError(f"{where}: {key} must be null, a token id in [0, {vocab_size - 1}] or a list of such, got {value!r}")
    return tuple(ids)
