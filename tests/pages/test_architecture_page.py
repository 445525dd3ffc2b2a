"""docs/ARCHITECTURE.md and the pages of rooms: short sentences, a picture drawn from the imports, names where they are said."""

from __future__ import annotations

import re
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest
from toolkit.paths import ROOT
from toolkit.rules.guides import ARCHITECTURE, GUIDES, long_cells, long_sentences
from toolkit.rules.imports import MAY_IMPORT

from specdec import SpecConfig
from specdec.engine.pages.pool import PagePool
from specdec.ops.products.tiles.quantised import MAX_WARP_M, hopper_tiles

MAX_WORDS, MAX_SENTENCE, MAX_CELL = 3500, 40, 200  # words of the page, words of a sentence, characters of a table's cell


def load_drawer() -> ModuleType:
    """scripts/draw_layers as a module."""
    loader = SourceFileLoader("draw_layers", str(ROOT / "scripts" / "draw_layers"))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = sys.modules[loader.name] = module_from_spec(spec)
    loader.exec_module(module)
    return module


drawer = load_drawer()


def test_the_picture_is_drawn_from_the_imports():
    """Keeps out: a picture of layers that the code has left."""
    assert drawer.PLACES.keys() == MAY_IMPORT.keys(), "PLACES in scripts/draw_layers"
    assert drawer.PICTURE.read_text() == drawer.draw(), "run scripts/draw_layers"


def test_another_import_changes_the_picture(tmp_path):
    """Keeps out: a picture that shows a table of arrows instead of the code, or that passes over what it can't place."""

    def drawn(**files: str) -> dict[str, list[str]]:
        root = tmp_path / str(sum(1 for _ in tmp_path.iterdir()))
        for room, text in files.items():
            (root / "specdec" / room).mkdir(parents=True)
            (root / "specdec" / room / "a.py").write_text(text)
        return drawer.read_imports(root).arrows

    found = drawn(serve="import specdec.decoder", models="import specdec.ops.norm")
    assert found == {"serve": ["decoder"], "models": ["ops"]}
    found = drawn(cli="import specdec.serve.a, specdec.decoder", serve="import specdec.decoder")
    assert found["cli"] == ["serve"]  # the other arrow follows from it
    both = "import specdec.batch.a, specdec.models.a"
    assert drawer.together(drawn(verify=both, draft=both)) == [(["verify", "draft"], ["batch", "models"])]
    assert len(drawer.together(drawn(verify=both, draft="import specdec.batch.a"))) == 2
    with pytest.raises(ValueError, match="models imports cli"):
        drawn(models="import specdec.cli.a")
    with pytest.raises(ValueError, match="no place for novel"):
        drawn(novel="import specdec.ops.norm")


def test_the_page_is_short():
    """Keeps out: a page that grows until nobody reads it."""
    assert len(ARCHITECTURE.read_text().split()) <= MAX_WORDS


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sentences_and_cells_are_short(path: Path) -> None:
    """Keeps out: sentences and cells of tables that nobody understands at first reading."""
    page = path.read_text()
    assert long_sentences(page, MAX_SENTENCE) == []
    assert long_cells(page, MAX_CELL) == []


def test_long_sentences_and_cells_are_seen():
    """Keeps out: a search blind to lists, tables and lines that are wrapped, or that counts code."""
    long = "word " * 40 + "end"
    for page in (long, f"a b.\n{long}\nc.", f"1. {long}", f"- a\n- {long}", f"| a |\n|---|\n| {long} |"):
        assert len(long_sentences(page, MAX_SENTENCE)) == 1, page
    short = "word " * 39 + "end."
    page = f"{short} {short}\n- {short}\n- {short}\n```text\n{long}\n```\n# {short}\n{short}"
    assert long_sentences(page, MAX_SENTENCE) == []
    assert long_cells("| " + "a" * 201 + " | b |", MAX_CELL) == ["a" * 201]
    assert long_cells("| " + "a" * 200 + " | " + "b" * 200 + " |", MAX_CELL) == []


def test_what_to_look_for_is_there():
    """Keeps out: a list of files to read that sends its reader to a name which has moved to another file."""
    page = ARCHITECTURE.read_text().partition("## Read these eight files")[2]
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (.+) \|$", page, re.MULTILINE)
    assert len(rows) == 8
    for path, hint in rows:
        missing = [name for name in re.findall(r"`(\w+)`", hint) if name not in (ROOT / path).read_text()]
        assert missing == [], path


def test_the_example_of_pages_is_right():
    """Keeps out: an account of what a request costs that the pool does not keep."""
    lookahead = SpecConfig(5, 8, 32).lookahead
    pages = PagePool(100, 16).pages_for(100 + lookahead)
    page = " ".join(ARCHITECTURE.read_text().split())
    assert f"trees of shape 5, 8, 32 the look-ahead is {lookahead} slots: 100 prompt tokens take {pages} pages of 16" in page


def test_the_example_of_a_product_is_right():
    """Keeps out: a guide to kernels that names another one than the tables do."""
    page = (ROOT / "specdec" / "ops" / "README.md").read_text()
    assert "12 rows of bfloat16 and an int4 weight with a scale for each 128 columns, on an H200" in page
    tiles = {M: hopper_tiles(M, 4096, 4096, "int4", 128, False, False) for M in (MAX_WARP_M, 12)}
    assert (MAX_WARP_M, tiles[MAX_WARP_M].kernel) == (8, "warp_hopper")
    assert (tiles[12].kernel, tiles[12].block_m) == ("warpgroup_hopper", 16)
