"""Token ids to text, piece by piece, so that the pieces joined are the whole.  Knows no model, only a tokenizer's `decode`."""

from __future__ import annotations

import os.path
from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"  # what a decoder shows for bytes that do not make a character yet


class Detokenizer:
    """Incremental decoding of one sequence.

    A token's text can depend on its neighbours (spaces, bytes of one character), so a new piece is the difference between
    decoding a window with and without the new tokens; and bytes are held back until their character is whole.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._start = 0  # the window's first token: what comes before can't change the text behind `_given`
        self._next_start = 0
        self._given = ""  # the window's text that has been given out

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that becomes certain with these tokens."""
        self._ids.extend(token_ids)
        text = self._decode(self._ids[self._start :])
        certain = text.rstrip(_INCOMPLETE)
        if not certain.startswith(self._given):
            return ""
        piece = certain[len(self._given) :]
        self._given = certain
        if piece and certain == text:  # tokens without text (special ones) stay in the window: they are no context
            self._start, self._next_start = self._next_start, len(self._ids)
            self._given = self._decode(self._ids[self._start :])
        return piece

    def flush(self) -> str:
        """The rest, incomplete characters included."""
        text = self._decode(self._ids[self._start :])
        common = os.path.commonprefix([text, self._given])
        self._given = text
        return text[len(common) :]


def decode_all(decode: Callable[[Sequence[int]], str], token_ids: Sequence[int]) -> str:
    """The text that a stream of these tokens shows, in one decoding where that is the same.

    Where the end is an incomplete character, decoders that fall back to bytes spoil whole characters before it as well,
    which a stream has long shown: then the tokens go one by one.
    """
    text = decode(token_ids)
    if not text.endswith(_INCOMPLETE):
        return text
    one_by_one = Detokenizer(decode)
    return "".join(one_by_one.add([token]) for token in token_ids) + one_by_one.flush()


def held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of the text may be the beginning of a stop string, and must not be shown yet."""
    longest = max((len(stop) for stop in stops), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0
