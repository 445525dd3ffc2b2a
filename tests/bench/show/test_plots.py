"""The figure of a measurement, and its bars on a terminal."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from toolkit.bench import cell_of, measured

from specdec.bench.show import plots
from specdec.bench.show.bars import BLOCKS, FULL, bar, print_bars


def test_the_figure_is_readable_in_grey_and_in_print() -> None:
    """Keeps out: letters smaller than 8 points, labels that are cut off, two shapes or phases that differ by colour alone."""
    cells = [
        replace(cell_of(), spec=spec, batch_size=size) for size in (1, 32) for spec in ((5, 1, 6), (5, 8, 32), (7, 10, 60))
    ]
    figure = plots.draw(measured(*cells))
    figure.canvas.draw()
    renderer, window = figure.canvas.get_renderer(), figure.bbox
    texts = [text for text in figure.findobj(match=lambda each: hasattr(each, "get_fontsize")) if text.get_text().strip()]
    assert texts and min(text.get_fontsize() for text in texts if text.get_visible()) >= 8
    for axes in figure.axes:
        box = axes.get_tightbbox(renderer)
        assert box.x0 >= window.x0 - 1 and box.x1 <= window.x1 + 1 and box.y0 >= window.y0 - 1 and box.y1 <= window.y1 + 1
    speed, phases = figure.axes[:2]
    assert len({patch.get_hatch() for patch in speed.patches if patch.get_facecolor()[:3] != (0.6, 0.6, 0.6)}) == 3
    assert len({patch.get_hatch() for patch in phases.patches}) >= 4


def test_a_round_stands_where_its_cost_and_tokens_are() -> None:
    """Keeps out: a point of another cell, and a line of equality that is none."""
    cell = cell_of()
    worth = plots.draw(measured(cell)).axes[3]
    point, line = worth.lines
    assert point.get_xdata() == pytest.approx([cell.speculative.phases.ms_per_round / cell.baseline.phases.ms_per_round])
    assert point.get_ydata() == pytest.approx([cell.speculative.counters.accept_length])
    assert list(line.get_xdata()) == list(line.get_ydata())


def bars_of(width: int, *, terminal: bool = True, encoding: str = "utf-8") -> list[str]:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_bars([cell_of()], Console(file=file, width=width, force_terminal=terminal, no_color=True, highlight=False))
    file.flush()
    return [line for line in file.buffer.getvalue().decode(encoding).splitlines() if line]  # type: ignore[attr-defined]


def test_bars_are_as_long_as_speeds() -> None:
    """Keeps out: bars in a file or where they can't be drawn, lines that break, lengths that say something else."""
    cell, lines = cell_of(), bars_of(80)
    lengths = [sum(1.0 if c == FULL else BLOCKS.index(c) / 8 for c in line if c in FULL + BLOCKS[1:]) for line in lines]
    assert len(lines) == 2 and all(len(line) <= 80 for line in lines)
    ratio = cell.baseline.tokens_per_second / cell.speculative.tokens_per_second
    assert lengths[0] / lengths[1] == pytest.approx(ratio, abs=0.02)
    assert not bars_of(80, terminal=False) and not bars_of(80, encoding="ascii") and not bars_of(30)
    assert bar(0, 10) == "" and bar(1, 10) == FULL * 10 and len(bar(0.55, 10)) == 6
