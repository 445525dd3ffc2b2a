"""The pages for whoever changes specdec, taken apart: their headings, paragraphs, sentences and tables."""

import re
from collections.abc import Iterator

from toolkit.paths import ROOT

ARCHITECTURE = ROOT / "docs" / "ARCHITECTURE.md"
TOPS = ("specdec", "draft", "verify", "attention")
ROOMS = tuple(sorted(path for top in TOPS for path in (ROOT / top).rglob("README.md") if path.parent.name != "pair"))
GUIDES = (ARCHITECTURE, ROOT / "CONTRIBUTING.md", *ROOMS)


def cells(page: str) -> Iterator[str]:
    """The cells of all tables."""
    for line in without_code(page).splitlines():
        if line.startswith("|") and not re.fullmatch(r"[|\-: ]+", line):
            yield from (cell.strip() for cell in line.strip("|").split("|"))


def paragraphs(page: str) -> Iterator[str]:
    """Paragraphs, items of lists and cells of tables, each on one line; no code and no headings."""
    lines: list[str] = []
    for line in [*without_code(page).splitlines(), ""]:
        if not line.strip() or line.startswith(("#", "|")) or re.match(r"\s*(-|\d+\.) ", line):
            if lines:
                yield " ".join(lines)
            lines = []
        if not line.startswith(("#", "|")):
            lines.append(re.sub(r"^\s*(-|\d+\.) ", "", line).strip())
    yield from cells(page)


def long_sentences(page: str, most: int) -> list[str]:
    """Sentences of more words than that."""
    sentences = (each for text in paragraphs(page) for each in re.split(r"(?<=[.!?])[*)\"]*\s+", text))
    return [each for each in sentences if len(each.split()) > most]


def long_cells(page: str, most: int) -> list[str]:
    """Cells of tables with more characters than that."""
    return [cell for cell in cells(page) if len(cell) > most]


def headings(page: str) -> list[str]:
    return [line.lstrip("#").strip() for line in without_code(page).splitlines() if line.startswith("#")]


def without_code(page: str) -> str:
    return re.sub(r"^( *)```.*?^\1```$", "", page, flags=re.MULTILINE | re.DOTALL)
