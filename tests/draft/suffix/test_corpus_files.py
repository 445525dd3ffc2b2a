"""Corpora as files: what is read, and what is refused by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec.prompts.corpus import PIECE, cut, pieces_of_file, read_corpus


class Letters:
    """A tokenizer whose tokens are the UTF-8 bytes of a text; it notes how long the pieces are that it is given."""

    def __init__(self) -> None:
        self.longest = 0

    def encode_pieces(self, pieces: list[str]) -> list[Any]:
        self.longest = max(self.longest, *map(len, pieces))
        return [np.frombuffer(piece.encode(), dtype=np.uint8).astype(np.int32) for piece in pieces]


def read(path: Path, most: int = 1000, tokenizer: Any = None) -> list[str]:
    texts = read_corpus(path, tokenizer or Letters(), most, "nearest setting that works: corpus_memory='2GiB'", 256)
    return [bytes(text.tolist()).decode() for text in texts]


TEXTS = ["a", "one two\nthree four", "ééééééééé", "𝄞𝄞𝄞𝄞 𝄞x\n\n\n", "x" * 50, "\n" * 20, " " * 20]


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_texts_come_back_whole(tmp_path: Path, text: str) -> None:
    """Keeps out: half characters at the end of a piece, pieces that are lost or longer than said."""
    path = tmp_path / "a.txt"
    path.write_text(text)
    with path.open("rb") as file:
        pieces = list(pieces_of_file(file, "a", 7))
    assert "".join(pieces) == text and max(len(piece.encode()) for piece in pieces) <= 7
    assert "".join(cut(text, 7)) == text and max(map(len, cut(text, 7))) <= 7
    assert read(path) == [text]


def test_a_text_of_many_pieces(tmp_path: Path) -> None:
    """Keeps out: pieces of the last batch that are left out."""
    path, letters, text = tmp_path / "a.txt", Letters(), "".join(f"line {i}\n" for i in range(150_000))
    path.write_text(text)
    assert read(path, len(text) + 2, letters) == [text] and letters.longest <= PIECE


def test_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one\\ntwo", "id": 3}\n\n{"text": ""}\n{"text": "three"}')
    assert read(path) == ["one\ntwo", "three"]
    for line, said in (
        ('{"prompt": "x"}', 'line 2 of corpus .* must be a JSON object with a string "text", got'),
        ("[1]", "line 2"),
        ('{"text": 5}', "line 2"),
        ('{"text": "\\ud800"}', "line 2 .*surrogates"),
        ('{"text": "a", "text": "b"}', "stands twice"),
        ("{", "line 2"),
        ("[" * 10_000, "line 2"),
    ):
        path.write_text('{"text": "one"}\n' + line)
        with pytest.raises(ValueError, match=said):
            read(path)


def test_files_that_are_refused(tmp_path: Path) -> None:
    """Keeps out: a long file that is read to its end before it is refused."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="holds no text"):
        read(path)
    path.write_bytes(b"abc \xff def")
    with pytest.raises(ValueError, match="must be UTF-8: invalid start byte at byte 4"):
        read(path)
    path.write_bytes("é".encode()[:1])
    with pytest.raises(ValueError, match="must be UTF-8: unexpected end of data at byte 0"):
        read(path)
    path.write_bytes(b"x" * 400)
    with pytest.raises(ValueError, match="has more than the 300 tokens .* nearest setting that works: corpus_memory='2GiB'"):
        read(path, 300)
    with pytest.raises(ValueError, match=r"has 400 bytes, too many for the 20 tokens .* nearest"):
        read(path, 20)
    path.write_bytes(b"x" * 299)
    assert len(read(path, 300)[0]) == 299
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="too many for"):
        read(path, 1 << 24)
