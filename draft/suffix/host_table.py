"""A table of texts on the host: their tokens in one line, and all places in the order of the tokens before them.

Texts belong to scopes, each with a key, and a row finds those of its own key alone: a scope's places lie together.

Shapes: N tokens of all texts, X places, S scopes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specdec.draft.suffix.sort import Ints, sorted_places

NO_TOKEN = -1  # before the first text and after each one
TOKEN_BYTES = 16  # of a table on a device: a token and its place, in a table that is read and in the next one
MAX_SCOPES = 1024  # of a table


class TableText(NamedTuple):
    """tokens_T: int32.  context: how many of the first ones are read to find places, and never proposed."""

    tokens_T: Ints
    context: int = 0

    @property
    def room(self) -> int:
        """How many tokens of a table it takes."""
        return len(self.tokens_T) + 1


class HostTable(NamedTuple):
    """text_N: int32, see NO_TOKEN.  order_X: int32, the places, scope by scope.  keys_S: int64, each another one and none 0.
    bounds_S2: int32, the first of each scope's places in the order, and the one after the last.
    """

    text_N: Ints
    order_X: Ints
    keys_S: Ints
    bounds_S2: Ints


def host_table(texts: Mapping[int, Sequence[TableText]]) -> HostTable:
    """The table of these texts, by the key of their scope; at most MAX_SCOPES."""
    assert len(texts) <= MAX_SCOPES and 0 not in texts
    end = np.full(1, NO_TOKEN, dtype=np.int32)
    pieces, is_place, firsts, room = [end], [np.zeros(1, dtype=bool)], list[int](), 1
    for own in texts.values():
        firsts.append(room)  # where the scope's texts begin
        for text in own:
            pieces += [text.tokens_T, end]
            is_place.append(np.arange(text.room) >= text.context)
            is_place[-1][-1] = False
            room += text.room
    text_N, is_place_N = np.concatenate(pieces), np.concatenate(is_place)
    order_X = sorted_places(text_N, np.flatnonzero(is_place_N).astype(np.int32))
    scopes_X = (np.searchsorted(np.asarray(firsts, dtype=np.int64), order_X, side="right") - 1).astype(np.int16)
    order_X = order_X[np.argsort(scopes_X, kind="stable")]
    sizes_S = np.bincount(scopes_X, minlength=len(texts))
    ends_S = np.cumsum(sizes_S)
    bounds_S2 = np.stack((ends_S - sizes_S, ends_S), axis=1).astype(np.int32)
    return HostTable(text_N, order_X, np.asarray(list(texts), dtype=np.int64), bounds_S2)
