"""Reads a corpus, of which drafts are made: a file of text, or lines of JSON with a text each, as token ids.

Files are read and encoded piece by piece, so that one that is too long is refused before much of it is in memory.  This module
knows files and a tokenizer, no table.

Shapes: T tokens of a text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from specdec.checks import distinct
from specdec.prompts.tokenizer import Tokenizer

PIECE = 1 << 16  # characters that are encoded at once; a long text is cut at the end of a line, or of a word
PIECES = 16  # that a tokenizer is given together
MAX_TOKEN_BYTES = 16  # a file of more bytes a token than that can't be meant: it is not read at all
Texts = list[NDArray[np.int32]]


def read_corpus(path: str | Path, tokenizer: Tokenizer, most: int, nearest: str, vocab_size: int) -> Texts:
    """[T] int32 of each text of a file, in order; texts without tokens are left out.

    The file is UTF-8.  A name that ends with .jsonl has a JSON object in each line, whose "text" is a text; any other file is
    one text.
    most: tokens of all texts, with one more for each.  nearest: what to do with a file that has more.
    ValueError if it can't be read so, or has more tokens.
    """
    place = Path(path)
    if (size := place.stat().st_size) > most * MAX_TOKEN_BYTES:
        raise ValueError(
            f"corpus {str(path)!r} has {size:,} bytes, too many for the {most:,} tokens that corpus_memory holds; {nearest}"
        )
    with place.open("rb") as file:
        texts = json_texts(file, str(path)) if place.suffix == ".jsonl" else [pieces_of_file(file, str(path))]
        found = encoded(texts, tokenizer, f"corpus {str(path)!r}", most, nearest, vocab_size)
    if not found:
        raise ValueError(f"corpus {str(path)!r} holds no text; nearest thing that works: a file with some text")
    return found


def encoded(
    texts: Iterable[Iterable[str]], tokenizer: Tokenizer, name: str, most: int, nearest: str, vocab_size: int
) -> Texts:  # fmt: skip
    """[T] int32 of each text, given in pieces.  See `read_corpus`; name: what errors call the corpus.

    The tokens are those within a text: nothing is put before the first one.
    """
    found: Texts = []
    room = 0
    for text in texts:
        parts: Texts = []
        for ids in _batches(text, tokenizer):
            if ids.size and int(ids.max()) >= vocab_size:
                raise ValueError(f"{name} has the token {int(ids.max())}, and the target {vocab_size} tokens")
            parts.append(ids)
            room += len(ids)
            if room + len(found) + 1 > most:
                raise ValueError(f"{name} has more than the {most:,} tokens that corpus_memory holds or has left; {nearest}")
        if sum(map(len, parts)):
            found.append(np.concatenate(parts))
    return found


def cut(text: str, most: int = PIECE) -> Iterator[str]:
    """The text in pieces of at most so many characters."""
    begin = 0
    while len(text) - begin > most:
        end = _cut_at(text[begin : begin + most])
        yield text[begin : begin + end]
        begin += end
    yield text[begin:]


def json_texts(file: IO[bytes], name: str) -> Iterator[Iterator[str]]:
    """The text of each line, in pieces.  ValueError names a line that is no JSON object with a text."""
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        expected = f'line {number} of corpus {name!r} must be a JSON object with a string "text"'
        try:
            found: Any = json.loads(line.decode(), object_pairs_hook=distinct)
            text = found.get("text") if isinstance(found, dict) else None
            if isinstance(text, str):
                text.encode()  # half of a surrogate pair is no character
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{expected}: {error}"[:300]) from None
        if not isinstance(text, str):
            raise ValueError(f"{expected}, got {line[:60]!r}")
        yield cut(text)


def pieces_of_file(file: IO[bytes], name: str, most: int = PIECE) -> Iterator[str]:
    """The text of a file in pieces, each of whole characters and at most so many bytes."""
    left, read = b"", 0
    while True:
        more = file.read(most - len(left))
        data = left + more
        if not data:
            return
        end = len(data) if not more else _cut_at(data)
        piece, left = data[:end], data[end:]
        try:
            text = piece.decode()
        except UnicodeDecodeError as error:
            if not (more and error.start >= end - 3 and error.reason == "unexpected end of data"):
                raise ValueError(
                    f"corpus {name!r} must be UTF-8: {error.reason} at byte {read + error.start}; nearest thing that works: "
                    "the same text as UTF-8"
                ) from None
            left, end = piece[error.start :] + left, error.start  # half of a character: the next piece has all of it
            text = piece[:end].decode()
        read += end
        yield text


def _cut_at(piece: Any) -> int:
    """Where to cut a full piece of characters or bytes: after its last line, or before its last word, or at its end."""
    newline, space = ("\n", " ") if isinstance(piece, str) else (b"\n", b" ")
    return piece.rfind(newline) + 1 or max(piece.rfind(space), 0) or len(piece)


def _batches(pieces: Iterable[str], tokenizer: Tokenizer) -> Iterator[NDArray[np.int32]]:
    """The ids of the pieces, of several at a time."""
    batch: list[str] = []
    for piece in pieces:
        batch.append(piece)
        if len(batch) == PIECES:
            yield from tokenizer.encode_pieces(batch)
            batch = []
    if batch:
        yield from tokenizer.encode_pieces(batch)
