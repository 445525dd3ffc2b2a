"""What is too long in a page: sentences and cells of tables.  Knows Markdown as this project writes it, and no single page."""

from __future__ import annotations

import re
from collections.abc import Iterator

ENDS = re.compile(r"(?<=[.!?])[*_)\"”]*\s+(?=[^a-z])")  # a sentence's end; the next one begins with no small letter
STARTS = re.compile(r"^\s*(?:[-*]|\d+\.)\s")  # of an item of a list


def long_sentences(page: str, most: int) -> list[str]:
    """The sentences of more than `most` words.  A span of code and a link's text count as they are read: code as one word."""
    found = []
    for block in _paragraphs(page):
        text = re.sub(r"`[^`]*`", "Code", block)
        text = re.sub(r"\[([^\]]*)\]\([^)\s]*\)", r"\1", text)
        found += [sentence for sentence in ENDS.split(text) if len(re.findall(r"\S*\w\S*", sentence)) > most]
    return found


def long_cells(page: str, most: int) -> list[str]:
    """The cells of tables that take more than `most` characters."""
    cells = [cell.strip() for line in _lines(page) if _in_table(line) for cell in re.split(r"(?<!\\)\|", line)]
    return [cell for cell in cells if len(cell) > most]


def headings(page: str) -> list[str]:
    return [line.lstrip("# ") for line in _lines(page) if line.startswith("#")]


def _paragraphs(page: str) -> Iterator[str]:
    """Paragraphs and items of lists, each as one line."""
    block: list[str] = []
    for line in [*_lines(page), ""]:
        apart = not line.strip() or _in_table(line) or line.startswith(("#", "<"))
        if (apart or STARTS.match(line)) and block:
            yield " ".join(block)
            block = []
        if not apart:
            block.append(STARTS.sub("", line).strip(" >"))


def _lines(page: str) -> Iterator[str]:
    """The lines outside of fences."""
    fenced = False
    for line in page.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
            yield ""
        elif not fenced:
            yield line


def _in_table(line: str) -> bool:
    return line.lstrip().startswith("|")
