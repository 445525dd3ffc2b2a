"""Text files to documents, documents to token blocks.

Knows where one story ends and the next begins, how to keep some stories out of training, and how to pack tokens
into rows of one length. Does not know models, tokenizer files or devices: a tokenizer is a callable here.
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
SIDE_ENDS = 0.7  # share of a run after which only the main text is read
LONGEST = 6000  # characters; books are cut at paragraphs to pieces of about this size

# UTF-8 read as cp1252 by whoever collected the stories, and typographic quotes: all to the plain ASCII sign.
REPAIRS = {
    "â€œ": '"', "â€\x9d": '"', "â€™": "'", "â€˜": "'", "â€“": "-", "â€”": "-", "â€¦": "...", "â€": '"',
    "“": '"', "”": '"', "‘": "'", "’": "'", "…": "...", "\r\n": "\n",
}  # fmt: skip
BROKEN = re.compile("[âãÂÃ][\u0080-\u02ff\u2000-\u2122]")

# A line that opens a story wherever it stands, and one that does so only if the story before it has some length.
OPENING = re.compile(r"once (upon a|there|a |in a)|once,|there once|(a )?long(, long)? time ago", re.I)
LIKELY_OPENING = re.compile(
    r"one (day|morning|night),? (an? |there|two )|\w+ and \w+ (are|were|like|liked|love|loved|live|lived) ", re.I
)
ENDING = re.compile(r"the end\W*$", re.I)


def read_text(path: str | Path) -> str:
    """The file's text; .xz and .gz are unpacked on the way."""
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
    """Documents of one file: at `<|endoftext|>` where it is used, else at story openings and line breaks."""
    for wrong, right in REPAIRS.items():
        text = text.replace(wrong, right)
    pieces = text.split(SEPARATOR) if SEPARATOR in text else _split_stories(text)
    cut = [part for piece in pieces for part in _cut_long(piece.strip())]
    return [part for part in cut if part and not BROKEN.search(part)]


def _split_stories(text: str) -> list[str]:
    # Some collections put one newline between stories and two between paragraphs, others two everywhere.
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
    """(train, held out): the last `share` of the documents, less those whose text also stands in the first part."""
    if not 0.0 < share < 1.0:
        raise ValueError(f"held_out: expected a share between 0 and 1, got {share}")
    cut = len(documents) - max(1, round(len(documents) * share))
    if cut < 1:
        raise ValueError(f"text: expected at least 2 documents to hold one out, got {len(documents)}")
    return list(documents[:cut]), list(documents[cut:])


def drop_seen(documents: Sequence[str], seen: Sequence[str], length: int = 60) -> list[str]:
    """`documents` without those whose first `length` characters, case aside, also open one of `seen`."""
    openings = {document[:length].lower() for document in seen}
    return [document for document in documents if document[:length].lower() not in openings]


def load_documents(paths: Sequence[str | Path], share: float) -> tuple[list[str], list[str]]:
    """(train, held out) over several files: each file gives its own last `share` of documents."""
    train: list[str] = []
    held: list[str] = []
    for path in paths:
        first, last = hold_out(split_documents(read_text(path)), share)
        train += first
        held += last
    # The held-out text must be new in every case and every file, so it is the training side that yields.
    return drop_seen(train, held), held


class TokenRows:
    """Documents as tokens, dealt into rows of `width`: another order, and so other rows, in every epoch."""

    def __init__(self, documents: Sequence[str], encode: Callable[[str], list[int]], width: int, device: str = "cpu"):
        pieces = [torch.tensor(encode(document), dtype=torch.int64) for document in documents]
        self.lengths = torch.tensor([len(piece) for piece in pieces])
        self.tokens = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)
        self.width, self.device, self.rows = width, device, len(self.tokens) // width
        if not self.rows:
            raise ValueError(f"text: expected at least {width} tokens (one row), got {len(self.tokens)}")
        self._epoch, self._cached = -1, torch.empty(0)

    def in_order(self) -> torch.Tensor:
        """Every full row, documents in file order."""
        return self.tokens[: self.rows * self.width].view(self.rows, self.width).to(self.device)

    def epoch(self, number: int, seed: int) -> torch.Tensor:
        """Every full row of epoch `number`; the same for the same (number, seed), so a resumed run reads on."""
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
        """Rows start .. start + count - 1 of the endless run of epochs."""
        parts = []
        while count:
            rows = self.epoch(start // self.rows, seed)[start % self.rows :][:count]
            parts.append(rows)
            start, count = start + len(rows), count - len(rows)
        return torch.cat(parts)


def mixed_batches(
    main: TokenRows, side: TokenRows | None, batch: int, steps: int, share: float, seed: int
) -> Callable[[int], torch.Tensor]:
    """A step's rows: at first `share` of them from `side`, falling to none at SIDE_ENDS of the run.

    A step's place in both texts follows from its number alone, so a resumed run reads on where it stopped.
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
    """The first 12 to 25 words of the first `count` documents that open at that length and as none of `seen` does."""
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
