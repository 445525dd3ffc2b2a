"""Reads text files, splits them into documents, and packs the documents' tokens into rows of one length.

This file knows where one story ends and the next begins, and how to keep some stories out of training.  It does not know models
or tokenizer files: a tokenizer is a callable from text to token ids.
"""

from __future__ import annotations

import gzip
import lzma
import re
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

SEPARATOR = "<|endoftext|>"
SIDE_ENDS = 0.7  # share of a run after which batches hold main text only
LONGEST = 6000  # characters of a document; longer ones, such as books, are cut between paragraphs into pieces of this size

# Typographic signs, also those of UTF-8 text that was decoded as cp1252 when the stories were collected, and their ASCII signs.
REPAIRS = {
    "â€œ": '"', "â€\x9d": '"', "â€™": "'", "â€˜": "'", "â€“": "-", "â€”": "-", "â€¦": "...", "â€": '"',
    "“": '"', "”": '"', "‘": "'", "’": "'", "…": "...", "\r\n": "\n",
}  # fmt: skip
BROKEN = re.compile("[âãÂÃ][\u0080-\u02ff\u2000-\u2122]")

# OPENING matches lines that always begin a story.  LIKELY_OPENING matches lines that do so if the story before is long enough.
OPENING = re.compile(r"once (upon a|there|a |in a)|once,|there once|(a )?long(, long)? time ago", re.I)
LIKELY_OPENING = re.compile(
    r"one (day|morning|night),? (an? |there|two )|\w+ and \w+ (are|were|like|liked|love|loved|live|lived) ", re.I
)
ENDING = re.compile(r"the end\W*$", re.I)


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file; .xz and .gz files are unpacked.  ValueError if there is no such file, or it is not UTF-8."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"text: expected a file of UTF-8 text (plain, .xz or .gz), got no file at {str(path)!r}")
    openers: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}
    opener = openers.get(path.suffix, open)
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"text: expected UTF-8 in {str(path)!r}, got {error.reason} at byte {error.start}") from error


def split_documents(text: str) -> list[str]:
    """The documents of one file's text.

    Text that holds `<|endoftext|>` is split there; other text is split at lines that look like the opening of a story.  Signs
    are repaired as REPAIRS says; documents longer than LONGEST are cut; empty ones and ones with broken encoding are left out.
    """
    for wrong, right in REPAIRS.items():
        text = text.replace(wrong, right)
    pieces = text.split(SEPARATOR) if SEPARATOR in text else _split_stories(text)
    cut = [part for piece in pieces for part in _cut_long(piece.strip())]
    return [part for part in cut if part and not BROKEN.search(part)]


def _split_stories(text: str) -> list[str]:
    # Some collections put one newline between stories and two between paragraphs; others put two in both places.
    single, double = len(re.findall(r"(?<!\n)\n(?!\n)", text)), text.count("\n\n")
    lines_separate = double and 0.1 < single / double < 1.0
    stories: list[str] = []
    for break_, line in re.findall(r"(^|\n+)([^\n]+)", text):
        if stories and not _opens(line, stories[-1], bool(lines_separate and break_ == "\n")):
            stories[-1] += break_ + line
        else:
            stories.append(line)
    return [re.sub(r" +(\n|$)", r"\1", story) for story in stories]


def _opens(line: str, before: str, after_separator: bool) -> bool:
    if not line.strip() or ENDING.match(line):
        return False
    if OPENING.match(line) or ENDING.search(before[-12:]):
        return True
    likely = LIKELY_OPENING.match(line) or (after_separator and line[0] not in "\"'")
    return bool(likely and len(before) >= 400)


def _cut_long(piece: str) -> list[str]:
    if len(piece) <= LONGEST:
        return [piece]
    parts = [""]
    for paragraph in re.split(r"\n{2,}", piece):
        if len(parts[-1]) + len(paragraph) > LONGEST and parts[-1]:
            parts.append("")
        parts[-1] += ("\n\n" if parts[-1] else "") + paragraph
    return parts


def hold_out(documents: Sequence[str], share: float) -> tuple[list[str], list[str]]:
    """The pair (documents to train on, held-out documents); the last `share` of the documents, at least one, is held out.

    ValueError if the share is not between 0 and 1, or if nothing would be left to train on.
    """
    if not 0.0 < share < 1.0:
        raise ValueError(f"held_out: expected a share between 0 and 1, got {share}")
    cut = len(documents) - max(1, round(len(documents) * share))
    if cut < 1:
        raise ValueError(f"text: expected at least 2 documents to hold one out, got {len(documents)}")
    return list(documents[:cut]), list(documents[cut:])


def drop_seen(documents: Sequence[str], seen: Sequence[str], length: int = 60) -> list[str]:
    """The documents whose first `length` characters open none of the documents in `seen`; upper and lower case count alike."""
    openings = {document[:length].lower() for document in seen}
    return [document for document in documents if document[:length].lower() not in openings]


def load_documents(paths: Sequence[str | Path], share: float) -> tuple[list[str], list[str]]:
    """The pair (documents to train on, held-out documents) of several files; the last `share` of each file is held out.

    Training documents that open like a held-out one are left out, so the held-out text is new whatever its case and file.
    ValueError as of read_text and hold_out.
    """
    train: list[str] = []
    held: list[str] = []
    for path in paths:
        first, last = hold_out(split_documents(read_text(path)), share)
        train += first
        held += last
    return drop_seen(train, held), held


class TokenRows:
    """The tokens of documents, one document after another, cut into rows of `width` tokens.

    Each epoch puts the documents in another random order, and so has other rows.  rows: full rows of an epoch; the tokens after
    the last full row are left out.  ValueError if there is not one full row.
    """

    def __init__(self, documents: Sequence[str], encode: Callable[[str], list[int]], width: int, device: str = "cpu") -> None:
        pieces = [torch.tensor(encode(document), dtype=torch.int64) for document in documents]
        self.lengths = torch.tensor([len(piece) for piece in pieces])
        self.tokens = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)
        self.width, self.device, self.rows = width, device, len(self.tokens) // width
        if not self.rows:
            raise ValueError(f"text: expected at least {width} tokens (one row), got {len(self.tokens)}")
        self._epoch, self._cached = -1, torch.empty(0)

    def in_order(self) -> torch.Tensor:
        """All full rows [rows, width] int64, with documents in the order of the files."""
        return self.tokens[: self.rows * self.width].view(self.rows, self.width).to(self.device)

    def epoch(self, number: int, seed: int) -> torch.Tensor:
        """All full rows [rows, width] of epoch `number`.  They depend on (number, seed) alone, so a resumed run can read on."""
        if number != self._epoch:
            order = torch.randperm(len(self.lengths), generator=torch.Generator().manual_seed(seed * 100003 + number))
            starts = (self.lengths.cumsum(0) - self.lengths)[order]
            lengths = self.lengths[order]
            shift = (starts - (lengths.cumsum(0) - lengths)).repeat_interleave(lengths)
            shuffled = self.tokens[torch.arange(len(self.tokens)) + shift]
            rows = shuffled[: self.rows * self.width].view(self.rows, self.width)
            self._epoch, self._cached = number, rows.to(self.device)
        return self._cached

    def take(self, start: int, count: int, seed: int) -> torch.Tensor:
        """Rows start .. start + count - 1, [count, width], of the endless sequence of epochs."""
        parts = []
        while count:
            rows = self.epoch(start // self.rows, seed)[start % self.rows :][:count]
            parts.append(rows)
            start, count = start + len(rows), count - len(rows)
        return torch.cat(parts)


def mixed_batches(
    main: TokenRows, side: TokenRows | None, batch: int, steps: int, share: float, seed: int
) -> Callable[[int], torch.Tensor]:
    """A function from a 0-based step to its rows [batch, width].

    At first the given share of the rows comes from `side`.  The share falls linearly and is 0 from SIDE_ENDS of the run on.
    The rows of a step follow from its number alone, so a resumed run reads on where it stopped.
    """
    fall = [max(0.0, 1.0 - step / (SIDE_ENDS * steps)) if side else 0.0 for step in range(steps)]
    counts = [round(batch * share * left) for left in fall]
    before = [0, *accumulate(counts)]

    def rows_of(step: int) -> torch.Tensor:
        rows = main.take(step * batch - before[step], batch - counts[step], seed)
        if side is None or not counts[step]:
            return rows
        return torch.cat([rows, side.take(before[step], counts[step], seed)])

    return rows_of


def openings(documents: Sequence[str], count: int, seen: Sequence[str] = (), seed: int = 0) -> list[str]:
    """The first 12 to 25 words (how many is random) of each of the first `count` documents that have a new opening.

    A document counts if its first line goes on after those words, and if the words stand nowhere in `seen`, case aside.
    ValueError if there are fewer such documents.
    """
    known = "\n".join(seen).lower()
    generator = torch.Generator().manual_seed(seed)
    found: list[str] = []
    for document in documents:
        words = document.split("\n")[0].split(" ")
        opening = " ".join(words[: int(torch.randint(12, 26, (), generator=generator))])
        if len(words) > 25 and opening.lower() not in known and len(found) < count:
            found.append(opening)
    if len(found) < count:
        raise ValueError(f"prompts: expected {count} held-out documents opening with 26 new words, got {len(found)}")
    return found
