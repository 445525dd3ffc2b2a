"""Reads files of text and splits them into documents, and says how it did that and what it left out.

What a file holds follows from its name and its text:
- `.jsonl`: a document per line, an object with `text`, `prompt`, `question`, `messages` (role and content) or `conversations`
  (from and value, as ShareGPT writes them).  The last two make chats, for targets with a chat template.
- text that holds `<|endoftext|>`: documents lie between these.
- other text: documents are separated as the `split` says that the caller chose.
All files may be packed as .xz or .gz.  This file knows no models and no tokenizer.
"""

from __future__ import annotations

import gzip
import json
import lzma
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.prompts.encode import chat_fault
from specdec.train.text.stories import split_stories

SEPARATOR = "<|endoftext|>"
MAX_LENGTH = 6000  # characters of a document; longer ones, such as books, are cut between paragraphs into pieces of this size
FORMATS = "UTF-8 text or .jsonl, plain or packed as .xz or .gz"

TEXT_KEYS = ("text", "prompt", "question")  # of a line that is no chat; the first one that it has is read

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Document:
    """text: of the document; of a chat what its messages say.  messages: of a chat; None for plain text."""

    text: str
    messages: Messages | None = None


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file; .xz and .gz files are unpacked.  ValueError if there is no such file, or it can't be read."""
    path = Path(path)
    if not path.is_file():
        got = "a folder" if path.is_dir() else "no file"
        raise ValueError(f"text: expected a file of {FORMATS}, got {got} at {str(path)!r}")
    openers: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}
    opener = openers.get(path.suffix, open)
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"text: expected UTF-8 in {str(path)!r}, got {error.reason} at byte {error.start}") from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"text: expected {FORMATS} in {str(path)!r}, got a file that can't be read: {error}") from error


def read_documents(path: str | Path, split: str = "auto") -> tuple[list[Document], str]:
    """(the documents of a file, a line that says how many there are, how they were found and what was left out).

    split: one of SPLITS, for text without `<|endoftext|>`.  Documents longer than MAX_LENGTH are cut, and empty ones left out.
    """
    path, text = Path(path), read_text(path)
    if Path(path.stem if path.suffix in (".xz", ".gz") else path.name).suffix == ".jsonl":
        documents = [_from_line(line, f"{path}, line {n}") for n, line in enumerate(text.split("\n"), 1) if line.strip()]
        return documents, f"{path}: {_count(documents)}, one per line"
    if SEPARATOR in text:
        pieces, how = text.split(SEPARATOR), f"between {SEPARATOR}"
    else:
        pieces, how = SPLITS[split](text)
    whole = [piece.strip() for piece in pieces if piece.strip()]
    parts = [Document(part) for piece in whole for part in _cut_long(piece)]
    note = f"{path}: {_count(whole)} {how}"
    return parts, note + (
        f", cut into {len(parts)} parts of at most {MAX_LENGTH} characters" if len(parts) > len(whole) else ""
    )


def _count(documents: Sequence[Any]) -> str:
    return f"{len(documents)} document{'s' * (len(documents) != 1)}"


def _from_line(line: str, where: str) -> Document:
    try:
        held = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"text: expected a JSON object in {where}, got {error}") from error
    if "\\u" in line and re.search("[\ud800-\udfff]", json.dumps(held, ensure_ascii=False)):  # tokenizers would not say where
        raise ValueError(f"text: expected text that UTF-8 can hold in {where}, got half of a surrogate pair")
    if isinstance(held, dict):
        for key in TEXT_KEYS:
            if isinstance(held.get(key), str) and held[key].strip():
                return Document(held[key])
        messages = held.get("messages")
        if messages is None and isinstance(held.get("conversations"), list):
            messages = [_message(turn) for turn in held["conversations"]]
        if messages is not None:
            if fault := chat_fault(messages, f"{where}, messages"):
                raise ValueError(f"text: {fault}")
            return Document("\n".join(str(message["content"]) for message in messages), list(messages))
    raise ValueError(
        f"text: expected an object with text, prompt, question, messages or conversations in {where}, got {line[:80]!r}"
    )


def _message(turn: Any) -> Any:
    """A turn of ShareGPT as a chat message; what is none stays as it is, for the check that follows to name."""
    roles = {"human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant"}
    if isinstance(turn, dict) and turn.get("from") in roles:
        return {"role": roles[turn["from"]], "content": turn.get("value")}
    return turn


def _cut_long(piece: str) -> list[str]:
    if len(piece) <= MAX_LENGTH:
        return [piece]
    parts = [""]
    for paragraph in re.split(r"\n{2,}", piece):
        if len(parts[-1]) + len(paragraph) > MAX_LENGTH and parts[-1]:
            parts.append("")
        parts[-1] += ("\n\n" if parts[-1] else "") + paragraph
    return parts


def _auto(text: str) -> tuple[list[str], str]:
    return _by_gaps(text) if re.search(r"\n[ \t]*\n[ \t]*\n", text) else _by_paragraphs(text)


def _by_gaps(text: str) -> tuple[list[str], str]:
    return re.split(r"\n(?:[ \t]*\n){2,}", text), "between two or more empty lines"


def _by_paragraphs(text: str) -> tuple[list[str], str]:
    return re.split(r"\n(?:[ \t]*\n)+", text), "between empty lines"


def _by_lines(text: str) -> tuple[list[str], str]:
    return text.split("\n"), "one per line"


def _by_stories(text: str) -> tuple[list[str], str]:
    stories, broken = split_stories(text)
    left_out = f", {broken} of broken encoding left out" if broken else ""
    return stories, f"at lines that look like a story's opening{left_out}"


def _whole(text: str) -> tuple[list[str], str]:
    return [text], "as a whole"


# How text without separators falls into documents, by the name that the flag --split takes.
SPLITS: dict[str, Callable[[str], tuple[list[str], str]]] = {
    "auto": _auto, "gaps": _by_gaps, "paragraphs": _by_paragraphs, "lines": _by_lines, "stories": _by_stories, "file": _whole,
}  # fmt: skip
