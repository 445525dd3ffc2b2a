"""Token ids to text, piece by piece, so that the pieces joined are the whole.  Knows no model, only a tokenizer's `decode`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"  # what a decoder shows for bytes that do not make a character yet


class Detokenizer:
    """Incremental decoding of one sequence.

    A token's text can depend on its neighbours (spaces, bytes of one character), so a new piece is the difference between
    decoding with and without the new tokens, behind enough old ones; and bytes are held back until a character is whole.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._context = 0  # decoding starts here: tokens before it can't change the text behind `_done`
        self._done = 0  # tokens whose text has been given out

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that becomes certain with these tokens."""
        self._ids.extend(token_ids)
        old = self._decode(self._ids[self._context : self._done])
        new = self._decode(self._ids[self._context :])
        if new.endswith(_INCOMPLETE) or not new.startswith(old):
            return ""
        self._context, self._done = self._done, len(self._ids)
        return new[len(old) :]

    def flush(self) -> str:
        """The rest, incomplete characters included."""
        old = self._decode(self._ids[self._context : self._done])
        new = self._decode(self._ids[self._context :])
        self._context = self._done = len(self._ids)
        return new[len(old) :] if new.startswith(old) else new


def held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of the text may be the beginning of a stop string, and must not be shown yet."""
    longest = max((len(stop) for stop in stops), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0
