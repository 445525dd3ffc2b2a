"""The pages of benchmarks/ are short, and comments that send their readers there name headings that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from toolkit.paths import ROOT
from toolkit.rules.guides import headings, long_cells, long_sentences

BENCHMARKS = ROOT / "benchmarks"
PAGES = sorted(BENCHMARKS.rglob("*.md"))
MAX_WORDS, MAX_SENTENCE, MAX_CELL = 14_000, 40, 200  # of all pages together, as `wc -w` counts; words; characters
TOPS = ("specdec", "draft", "verify", "attention", "tests", "benchmarks", "scripts", "examples", "docs")


def test_all_pages_together_are_short() -> None:
    """Keeps out: histories of older numbers that come back, page by page."""
    words = {str(page.relative_to(ROOT)): len(page.read_text().split()) for page in PAGES}
    assert len(words) == 11 and sum(words.values()) <= MAX_WORDS, words


@pytest.mark.parametrize("path", [*PAGES, ROOT / "docs" / "BENCHMARKS.md"], ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_and_cells_are_short(path: Path) -> None:
    """Keeps out: a sentence that must be read twice, and a table with paragraphs in it."""
    page = path.read_text()
    assert long_sentences(page, MAX_SENTENCE) == [] and long_cells(page, MAX_CELL) == []


def references(text: str) -> list[tuple[str, str]]:
    """(page, heading) of each mention of a page of benchmarks/; the heading is empty where a whole page is meant."""
    flat = re.sub(r"\n\s*(?:#\s*)?", " ", text)
    return re.findall(r"\bbenchmarks/((?:\w+/)?[A-Z]+\.md)`?(?:, \"([^\"]+)\")?", flat)


def broken_references(text: str) -> list[tuple[str, str]]:
    found = []
    for page, heading in references(text):
        path = BENCHMARKS / page
        if not path.exists() or heading and heading not in headings(path.read_text()):
            found.append((page, heading))
    return found


def test_headings_that_the_code_names_are_there() -> None:
    """Keeps out: a threshold whose comment says where it was measured, and a page that does not say so any more."""
    files = [file for top in TOPS for ending in ("py", "md") for file in (ROOT / top).rglob(f"*.{ending}")]
    files = [file for file in [*files, *ROOT.glob("*.md")] if file != Path(__file__).resolve()]
    texts = {str(file.relative_to(ROOT)): file.read_text() for file in files}
    assert sum(len(references(text)) for text in texts.values()) > 40
    assert {name: broken for name, text in texts.items() if (broken := broken_references(text))} == {}


def test_a_broken_reference_is_seen() -> None:
    """Keeps out: a search that overlooks a heading on the comment's next line."""
    page = (
        'see `benchmarks/texts/README.md`, "Near-ties".\n# Measured: benchmarks/texts/README.md, "The look\n    # at a tail".'
    )
    assert broken_references(page) == [("texts/README.md", "The look at a tail")]
    assert broken_references("benchmarks/no/README.md") == [("no/README.md", "")]


def missing_files(page: str) -> list[str]:
    """Python files in backticks that are in no folder of the repository, under the path that the page gives."""
    held = ["/" + str(file.relative_to(ROOT)) for top in TOPS for file in (ROOT / top).rglob("*.py")]
    return [name for name in re.findall(r"`([\w/]+\.py)[` ]", page) if not any(path.endswith(f"/{name}") for path in held)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(BENCHMARKS)))
def test_files_that_pages_name_are_there(path: Path) -> None:
    """Keeps out: a rule that a reader looks for in a file which was moved."""
    assert missing_files(path.read_text()) == []
    assert missing_files("`tiles/dense.py` `mla_tiles.py prompts` `no/dense.py`") == ["no/dense.py"]
