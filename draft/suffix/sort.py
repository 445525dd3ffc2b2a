"""Sorts the places of a text by the tokens before them, on the host.

Ranks are doubled: the order by one token gives that by two, by four and by eight.  So whatever the text is, one token a billion
times for example, there are as many sorts of whole numbers and nothing compares long runs.

Shapes: N tokens of a text, X places.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from specdec.draft.ngram.lookup import MAX_MATCH

Ints: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"  # an array of whole numbers


def sorted_places(text_N: Ints, places_X: Ints) -> Ints:
    """[X] int32: these places by the tokens before them, the nearest one first; those with equal ones stay in their order.

    text_N: int32, -1 for what is no token.  places_X: int32, ascending.  A place has at most MAX_MATCH tokens before it.
    """
    assert MAX_MATCH == 8, "ranks are doubled three times"
    ranks_N = _before(text_N.astype(np.int64) + 1, 1)  # of the token before each place
    width = 1
    while width < MAX_MATCH // 2:
        ranks_N = _dense(_pairs(ranks_N, width))
        width *= 2
    keys_X = _pairs(ranks_N, width)[places_X]
    return places_X[np.argsort(keys_X, kind="stable")].astype(np.int32)


def _before(values_N: Ints, width: int) -> Ints:
    """The values so many places earlier; 0 before the first place."""
    moved_N = np.zeros_like(values_N)
    moved_N[width:] = values_N[:-width]
    return moved_N


def _pairs(ranks_N: Ints, width: int) -> Ints:
    """Numbers that are ordered as (the rank of the nearer tokens, the rank of as many before them)."""
    return (ranks_N << 32) | _before(ranks_N, width)


def _dense(keys_N: Ints) -> Ints:
    """[N] int64: the rank of each key among all different ones, from 1 on; 0 is left for what is before the text."""
    order_N = np.argsort(keys_N)  # in whatever order equal ones come, they have one rank
    sorted_N = keys_N[order_N]
    is_next_N = np.empty(len(keys_N), dtype=bool)
    is_next_N[:1], is_next_N[1:] = True, sorted_N[1:] != sorted_N[:-1]
    ranks_N = np.empty(len(keys_N), dtype=np.int64)
    ranks_N[order_N] = np.cumsum(is_next_N)
    return ranks_N
