"""Checks that settings share: the value, or an error that names it, what was expected and the nearest value that works."""

from __future__ import annotations

import math
from typing import Any


def require_int(name: str, value: Any, low: int, high: float = math.inf) -> int:
    """The value, if it is an int within [low, high].  bool is no int here."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    if not low <= value <= high:
        bounds = f">= {low}" if high == math.inf else f"in [{low}, {int(high)}]"
        nearest = low if value < low else int(high)
        raise ValueError(f"{name} must be {bounds}, got {value}; nearest setting that works: {name}={nearest}")
    return value


def require_float(name: str, value: Any, low: float, high: float, *, above_low: bool = False) -> float:
    """The value as a float, if it is a finite number within [low, high] (or (low, high])."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    if not low <= value <= high or (above_low and value == low):
        bounds = f"{'(' if above_low else '['}{low}, {high}]"
        nearest = high if value > low else low
        hint = "" if above_low and nearest == low else f"; nearest setting that works: {name}={nearest}"
        raise ValueError(f"{name} must be in {bounds}, got {value}{hint}")
    return float(value)
