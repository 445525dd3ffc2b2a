"""Keys of a config.json that repeat what another key says: under another name, or as a size that follows from others.

transformers takes the other name where both are there, and passes most repeated sizes over or fails on them: a config in which
they contradict each other is nobody's, and an error here.  Knows no family.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, TypeVar

from specdec.models.checkpoints.config_values import whole

C = TypeVar("C")


def telling_names(
    others: Mapping[str, str],
) -> Callable[[Callable[[dict[str, Any], str], C]], Callable[[dict[str, Any], str], C]]:
    """Of a family's parser: its errors say, of a key that they name, which other name the file has for it.

    others: as of `by_own_names`, which the parser calls.
    """

    def telling(parse: Callable[[dict[str, Any], str], C]) -> Callable[[dict[str, Any], str], C]:
        @wraps(parse)
        def told(raw: dict[str, Any], where: str) -> C:
            try:
                return parse(raw, where)
            except ValueError as error:
                said = str(error)
                named = [(own, other) for other, own in others.items() if other in raw and own not in raw]
                hints = [f"{own} is {other} there" for own, other in named if _names(said, own) and not _names(said, other)]
                if not hints:
                    raise
                raise type(error)(f"{said} ({', '.join(hints)})") from error

        return told

    return telling


def _names(said: str, key: str) -> bool:
    return re.search(rf"\b{key}\b", said) is not None


def by_own_names(raw: dict[str, Any], others: Mapping[str, str], where: str) -> dict[str, Any]:
    """The config with every value under the name that its family's parser reads.

    others: other names of keys, and the name that is read.  ValueError if both names are there and say different things.
    """
    named = {key: value for key, value in raw.items() if key not in others}
    for other, own in others.items():
        if raw.get(other) is None:
            continue
        if named.get(own, raw[other]) not in (None, raw[other]):
            raise ValueError(
                f"{where}: {other} is another name of {own}, so both must be equal where both are there, got {raw[other]!r} "
                f"and {named[own]!r}; nearest thing that works: {own} alone"
            )
        named[own] = raw[other]
    return named


def with_unsaid(raw: dict[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The config with these values for keys that are absent or null."""
    return {**raw, **{key: size for key, size in sizes.items() if raw.get(key) is None}}


def expect_repeated(raw: dict[str, Any], key: str, size: int, said_by: str, where: str) -> None:
    """ValueError if a key says another size than the keys do from which it follows.  said_by: these keys."""
    if whole(raw, key, where, size) != size:
        raise ValueError(
            f"{where}: {key} must be {said_by}, {size}, or absent, got {raw[key]}; nearest thing that works: no {key}"
        )
