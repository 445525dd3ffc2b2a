"""Checks that settings share: the value, or an error that names it, what was expected and the nearest value that works."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any


def require_int(name: str, value: Any, low: int, high: float = math.inf) -> int:
    """The value as an int, if it is an integer of Python or numpy within [low, high].  A bool is refused."""
    if not is_number(type(value), Integral):
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    if not low <= value <= high:
        bounds = f">= {low}" if high == math.inf else f"in [{low}, {int(high)}]"
        nearest = low if value < low else int(high)
        raise ValueError(f"{name} must be {bounds}, got {value}; nearest setting that works: {name}={nearest}")
    return int(value)


def require_float(name: str, value: Any, low: float, high: float, *, above_low: bool = False) -> float:
    """The value as a float, if it is a finite number of Python or numpy within [low, high] (or (low, high])."""
    if not is_number(type(value), Real):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    if not low <= value <= high or (above_low and value == low):
        bounds = f"{'(' if above_low else '['}{low}, {high}]"
        nearest = high if value > low else low
        hint = "" if above_low and nearest == low else f"; nearest setting that works: {name}={nearest}"
        raise ValueError(f"{name} must be in {bounds}, got {value}{hint}")
    return float(value)


def is_number(kind: type, of: type) -> bool:
    """Whether values of this type are numbers `of` Integral or Real.  A bool is none, though Python counts it as one."""
    return issubclass(kind, of) and not issubclass(kind, bool)


def store(settings: object, **values: Any) -> None:
    """Puts checked values into a frozen dataclass while it is being made: only there may its fields be set."""
    for name, value in values.items():
        object.__setattr__(settings, name, value)


def is_array(value: Any) -> bool:
    """Whether it is an array of numpy or torch, told by what those have, so that neither must be imported to ask."""
    return all(hasattr(value, name) for name in ("ndim", "dtype", "tolist"))
