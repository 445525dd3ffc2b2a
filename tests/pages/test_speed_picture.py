"""docs/speed.svg, the README's picture of speed, against the measurement that it says it shows."""

from __future__ import annotations

import json
import runpy
from types import SimpleNamespace

from toolkit.paths import ROOT

script = SimpleNamespace(**runpy.run_path(str(ROOT / "scripts" / "draw_speed")))


def test_the_picture_is_what_was_measured() -> None:
    """Keeps out: a picture of other numbers than the JSON's, bars whose lengths say something else, a case that is renamed."""
    rows = script.rows_of(json.loads(script.DATA.read_text()))
    assert script.PICTURE.read_text() == script.draw(rows), "make it again: .venv/bin/python scripts/draw_speed"
    assert rows[0].accept_length == 1 and rows[0].rate < rows[1].rate < rows[2].rate
    drawn = script.draw(rows)
    assert all(f">{row.rate:,.0f}, {row.accept_length:.1f} token" in drawn for row in rows)
    lengths = [float(part.split('"')[0]) for part in drawn.split('width="')[3:]]
    assert all(abs(length / lengths[0] - row.rate / rows[0].rate) < 1e-2 for length, row in zip(lengths, rows, strict=True))
