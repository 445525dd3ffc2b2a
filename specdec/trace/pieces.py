"""Cuts a text into the texts of its tokens.  This module knows no model, only a tokenizer's `decode`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from specdec.engine.detokenize import Decode, Detokenizer
from specdec.generation import Chunk, Generation


class TokenPieces:
    """Cuts the text of a stream into the texts of its tokens.

    A token's text is what becomes certain with it.  So a character that several tokens make belongs to the last of them, and so
    do the bytes at the end that make none.

    decode: turns ids into text.  prompt_ids: what the stream continues.
    """

    def __init__(self, decode: Decode, prompt_ids: Sequence[int]) -> None:
        self._detokenizer = Detokenizer(decode, prompt_ids)
        self._unshown: deque[tuple[int, Any]] = deque()  # characters of tokens that the stream holds back, and their marks
        self._last: Any = 0

    def of(self, chunk: Chunk, marks: Sequence[Any] | None = None) -> Iterator[tuple[str, Any]]:
        """The pieces of the stream's next chunk, each with the mark of its token.  marks: one a token; None: the origins."""
        for token, self._last in zip(chunk.token_ids, chunk.origins if marks is None else marks, strict=True):
            self._unshown.append((len(self._detokenizer.add(token)), self._last))
        text = chunk.text
        while text:
            size, mark = self._unshown.popleft() if self._unshown else (len(text), self._last)
            if size > len(text):
                self._unshown.appendleft((size - len(text), mark))
            if size:
                yield text[:size], mark
            text = text[size:]


def pieces_of(generation: Generation, decode: Decode) -> list[str]:
    """What each token adds to the text; joined they are the text.  A token without a text of its own has an empty one."""
    pieces, places = [""] * len(generation.token_ids), list(range(len(generation.token_ids)))
    cut = TokenPieces(decode, generation.prompt_token_ids)
    for text, place in cut.of(Chunk(generation.text, generation.token_ids, generation.origins), places):
        pieces[place] += text
    return pieces
