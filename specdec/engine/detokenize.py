"""Turns token ids into text, token by token, so that the joined pieces are the whole text.

This module knows no model, only a tokenizer's `decode`.

The text of a request is what decoding its prompt and its output together adds to decoding the prompt alone.  Decoding the
output alone would give another text: many decoders strip the first space of whatever they are given.

`tokenizers.DecodeStream` can't stand in for it: it fails where a decoder that falls back to bytes takes back what it has shown
("Invalid prefix encountered"), keeps the last bytes to itself, and knows neither slow tokenizers nor `decode` of a GGUF file's.
"""

from __future__ import annotations

import os.path
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"  # what a decoder shows for bytes that do not form a whole character yet

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Incremental decoding of one request's output.

    A token's text can depend on its neighbours (spaces, bytes of one character).  So every token is decoded together with a
    few tokens before it, its context, and the token's text is what it adds to the context's text.  Bytes are held back until
    they form a whole character.

    In one case the text differs from decoding everything at once.  A decoder that falls back to bytes shows a whole run of
    byte tokens as broken as soon as one of them is broken.  A stream can't take back characters of that run which it has
    already shown, so those characters stay in the text.
    """

    def __init__(self, decode: Decode, prompt_ids: Sequence[int]) -> None:
        self._decode = decode
        self._window = context_of(decode, prompt_ids)  # the context, and the tokens that came after it
        self._given = decode(self._window)  # the window's text that the prompt holds or that `add` has returned
        self._context_size = len(self._window)  # how many of the window's first tokens have all their text in `_given`

    def add(self, token_id: int) -> str:
        """Takes one more token.  Returns the text that has become certain with it, which may be empty."""
        self._window.append(token_id)
        text = self._decode(self._window)
        shared = _shared(self._given, text)
        if shared is None:  # text that was already returned has changed: the tokens after the context are decoded alone
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
        """The text that `add` has held back so far, incomplete characters included."""
        text = self._decode(self._window)
        piece = text[_shared(self._given, text) or 0 :]
        self._given = text
        return piece

    def _move(self) -> None:
        """Makes the tokens since the last move the new context, if they can serve as one, so that the window stays short."""
        recent = self._window[self._context_size :]
        text = self._decode(recent)
        if _is_context(text):
            self._window, self._given = recent, text
        self._context_size = len(self._window)

    def _drop_without_text(self) -> None:
        """Forgets the last token if it has no text and changes none around it, as is true of special tokens.

        Otherwise a long run of such tokens would make the window longer and longer.
        """
        context = self._window[: self._context_size]
        if self._given and self._decode(self._window + context) == self._decode(self._window[:-1] + context):
            self._window.pop()


def decode_all(decode: Decode, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> str:
    """The same text that a stream of these tokens shows, made with a single decoding where that gives the same text.

    A single decoding can differ from the stream only where a character is broken, with decoders that fall back to bytes.
    In that case the tokens are decoded one by one.
    """
    context = context_of(decode, prompt_ids)
    text = decode([*context, *token_ids])
    shared = _shared(decode(context), text)
    if shared is not None and _INCOMPLETE not in text[shared:]:
        return text[shared:]
    one_by_one = Detokenizer(decode, prompt_ids)
    return "".join(one_by_one.add(token) for token in token_ids) + one_by_one.flush()


def context_of(decode: Decode, prompt_ids: Sequence[int]) -> list[int]:
    """The last few tokens of a prompt, as many as the text of later tokens can depend on; all of the prompt if in doubt."""
    size = 4
    while size < len(prompt_ids):
        tail = list(prompt_ids[-size:])
        if _is_context(decode(tail)):
            return tail
        size *= 2
    return list(prompt_ids)


class StopStrings:
    """The stop strings of one request.

    A request may hold thousands of them, and other requests wait while they are looked for.  So the time that one token takes
    hardly grows with their number.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = frozenset(stops)
        self._sorted = sorted(self._stops)
        self._sizes = sorted({len(stop) for stop in stops})

    def held_back(self, text: str) -> int:
        """How many characters at the end of the text must not be shown yet, because a stop string may begin with them."""
        longest = self._sizes[-1] if self._sizes else 0
        for size in range(min(longest - 1, len(text)), 0, -1):
            end = text[-size:]
            at = bisect_left(self._sorted, end)  # strings that begin alike stand together, from here on
            if at < len(self._sorted) and self._sorted[at].startswith(end):
                return size
        return 0

    def find(self, text: str, seen: int) -> tuple[int, int] | None:
        """Where the first stop string begins and ends that ends after the first `seen` characters; None: there is none."""
        found = (
            (end - size, end)
            for end in range(seen + 1, len(text) + 1)
            for size in self._sizes[: bisect_right(self._sizes, end)]
            if text[end - size : end] in self._stops
        )
        return min(found, default=None)


def _is_context(text: str) -> bool:
    """Whether tokens with this text can stand for all tokens before the next one.

    Tokens without text can't: a decoder would treat the next token as the first one and strip its space.  Tokens whose text
    begins with a broken character can't either: that may be the second half of a character whose first half is missing.
    """
    return bool(text) and not text.startswith(_INCOMPLETE)


def _shared(given: str, text: str) -> int | None:
    """The length of the common beginning of both texts; None if the new text changes a whole character of the given one."""
    shared = len(os.path.commonprefix([given, text]))
    return None if shared < len(given.rstrip(_INCOMPLETE)) else shared
