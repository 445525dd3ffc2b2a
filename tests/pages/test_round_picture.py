"""docs/round.svg, the README's picture, against the round that it says it shows."""

from __future__ import annotations

import runpy
from types import SimpleNamespace

from toolkit.paths import ROOT

from specdec import SpecDecoder, shipped

script = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "draw_round")))


def test_the_picture_is_what_happens() -> None:
    """Keeps out: a picture of a round as it once was, or as nobody ever saw it."""
    pair = shipped.target_folder(), shipped.draft_folder()
    with SpecDecoder.from_pretrained(*pair, device="cpu", dtype="float32", smoke=False, max_batch_size=1) as decoder:
        shown = script.watch(decoder, script.PROMPT, script.ROUND)
    assert len(shown.words) == 16 and len(shown.path) == 6 and shown.bonus.strip() == "One"  # as the README describes it
    assert script.PICTURE.read_text() == script.draw(shown), "make it again: .venv/bin/python scripts/draw_round"


def test_nodes_stand_by_level() -> None:
    """Keeps out: two nodes in one place, a child in its parent's column."""
    assert script.lay_out([0, 0, 0, 1, 2]) == [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1)]
