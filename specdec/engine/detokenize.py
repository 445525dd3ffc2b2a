"""Token ids to text, token by token, so that the pieces joined are the whole.  Knows no model, only a tokenizer's `decode`.

The text of a request is what decoding its prompt and its output together adds to decoding the prompt alone.  Decoding the
output alone would give another text: many decoders strip the first space of whatever they are given.
"""

from __future__ import annotations

import os.path
from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"  # what a decoder shows for bytes that do not make a character yet

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Incremental decoding of one request's output.

    A token's text can depend on its neighbours (spaces, bytes of one character).  So every token is decoded after a few
    tokens before it, its context, and its text is the difference.  Bytes are held back until their character is whole.

    One case differs from decoding everything at once.  Decoders that fall back to bytes show a whole run of byte tokens as
    broken as soon as one of them is; a stream can't take back the characters of the run that it has shown, so they stay.
    """

    def __init__(self, decode: Decode, prompt_ids: Sequence[int]) -> None:
        self._decode = decode
        self._window = context_of(decode, prompt_ids)  # the context, and the tokens that came after it
        self._given = decode(self._window)  # the window's text that the prompt holds or that `add` has returned
        self._context_size = len(self._window)  # how many of the window's first tokens have all their text in `_given`

    def add(self, token_id: int) -> str:
        """The text that becomes certain with this token."""
        self._window.append(token_id)
        text = self._decode(self._window)
        shared = _shared(self._given, text)
        if shared is None:  # text that was returned has changed: what came after it is decoded on its own
            self._window, self._context_size = self._window[self._context_size :], 0
            text, self._given, shared = self._decode(self._window), "", 0
        certain = text.rstrip(_INCOMPLETE)
        piece = certain[shared:]
        if piece:
            self._given = certain
        if certain == text:
            if piece:
                self._move()
            else:
                self._drop_without_text()
        return piece

    def flush(self) -> str:
        """The rest, incomplete characters included."""
        text = self._decode(self._window)
        piece = text[_shared(self._given, text) or 0 :]
        self._given = text
        return piece

    def _move(self) -> None:
        """The tokens since the last move become the context, if they can be one: so the window stays short."""
        recent = self._window[self._context_size :]
        text = self._decode(recent)
        if _is_context(text):
            self._window, self._given = recent, text
        self._context_size = len(self._window)

    def _drop_without_text(self) -> None:
        """Forgets the last token if it leaves no trace even between texts, as special tokens do.

        Without this, a long row of such tokens would make the window longer and longer.
        """
        context = self._window[: self._context_size]
        if self._given and self._decode(self._window + context) == self._decode(self._window[:-1] + context):
            self._window.pop()


def decode_all(decode: Decode, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> str:
    """The text that a stream of these tokens shows, in one decoding where that is the same.

    Only where a character is broken may it differ, with decoders that fall back to bytes: there the tokens go one by one.
    """
    context = context_of(decode, prompt_ids)
    text = decode([*context, *token_ids])
    shared = _shared(decode(context), text)
    if shared is not None and _INCOMPLETE not in text[shared:]:
        return text[shared:]
    one_by_one = Detokenizer(decode, prompt_ids)
    return "".join(one_by_one.add(token) for token in token_ids) + one_by_one.flush()


def context_of(decode: Decode, prompt_ids: Sequence[int]) -> list[int]:
    """The last few tokens of a prompt, as many as the text of what follows can depend on; all of them if in doubt."""
    size = 4
    while size < len(prompt_ids):
        tail = list(prompt_ids[-size:])
        if _is_context(decode(tail)):
            return tail
        size *= 2
    return list(prompt_ids)


def held_back(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of the text may be the beginning of a stop string, and must not be shown yet."""
    longest = max((len(stop) for stop in stops), default=0)
    for size in range(min(longest - 1, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops):
            return size
    return 0


def _is_context(text: str) -> bool:
    """Whether tokens of this text can stand for all tokens before the next one.

    Tokens without text would leave the next token first, and its space stripped.  A broken character at the beginning may
    be the second half of a whole one, whose first half is missing.
    """
    return bool(text) and not text.startswith(_INCOMPLETE)


def _shared(given: str, text: str) -> int | None:
    """How many characters the new text begins with that were given; None if it changes one that was whole."""
    shared = len(os.path.commonprefix([given, text]))
    return None if shared < len(given.rstrip(_INCOMPLETE)) else shared
