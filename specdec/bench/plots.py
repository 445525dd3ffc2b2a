"""One figure of a finished measurement: speed of both sides, and acceptance by depth.  Needs matplotlib."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

from specdec.bench.measurement import Cell, Measurement

BASELINE_COLOUR = "#999999"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")  # Okabe and Ito: safe for colour-blind readers
MARKERS = "osD^vP"


def require(path: Path) -> None:
    """ValueError if matplotlib is absent or can't write such a file; asked before a long run, not behind it."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        install = f"{sys.executable} -m pip install matplotlib"
        raise ValueError(f"--plot needs matplotlib, which is not installed; to install it: {install}") from error
    endings = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in endings:
        raise ValueError(f"--plot must end in one of .{', .'.join(sorted(endings))}; got {str(path)!r}")


def write_plot(measurement: Measurement, path: Path) -> None:
    """Writes the figure in the format that the path's ending names."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width = max(10.5, 5 + 0.75 * len(measurement.cells))
    figure = Figure(figsize=(width, 4.6), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(width - 5, 5))
    forced = measurement.synthetic_acceptance
    tag = "" if forced is None else "SYNTHETIC: "
    _speed(left, measurement.cells, tag)
    _acceptance(right, measurement.cells, tag)
    settings = measurement.settings
    figure.suptitle(
        ("" if forced is None else f"{tag}acceptance forced to {', '.join(map(str, forced))} by depth\n")
        + f"{_short(settings['target'])} with {_short(settings['draft'])}, {settings['dtype']}, "
        f"{settings['attention']} attention\n{measurement.machine['runs_on']}",
        fontsize=10,
    )
    figure.savefig(path)


def _short(path: str) -> str:
    return "/".join(Path(path).parts[-2:])


def _speed(axes: Any, cells: list[Cell], tag: str) -> None:
    """Bars of tok/s, a group a batch size; each shape stands beside its own baseline, with its speed-up on the bar."""
    sizes = list(dict.fromkeys(cell.batch_size for cell in cells))
    names = list(dict.fromkeys(cell.name for cell in cells))
    width = 0.8 / (2 * len(names))
    for cell in cells:
        group, i = sizes.index(cell.batch_size), names.index(cell.name)
        x = group - 0.4 + width * (2 * i + 0.5)
        note = "outputs differ" if cell.speed_up is None else f"{cell.speed_up:.2f}x"
        is_first = group == 0
        plain, fast = cell.baseline.tokens_per_second, cell.speculative.tokens_per_second
        _bar(axes, x, plain, width, BASELINE_COLOUR, "its baseline" if is_first and i == 0 else None, "")
        _bar(axes, x + width, fast, width, COLOURS[i % len(COLOURS)], f"S,k,nd = {cell.name}" if is_first else None, note)
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_xlabel("batch size")
    axes.set_ylabel("output tokens per second")
    axes.set_title(f"{tag}Speed (on the bars: against the baseline beside)", fontsize=10)
    axes.margins(y=0.2)
    _clean(axes)
    _legend_below(axes, 4)


def _bar(axes: Any, x: float, height: float, width: float, colour: str, label: str | None, note: str) -> None:
    bars = axes.bar(x, height, width * 0.94, color=colour, label=label)
    axes.bar_label(bars, [note], padding=4, fontsize=8, rotation=90)


def _acceptance(axes: Any, cells: list[Cell], tag: str) -> None:
    """Lines of the smallest batch: acceptance doesn't depend on the batch size."""
    smallest = min(cell.batch_size for cell in cells)
    for i, cell in enumerate(cell for cell in cells if cell.batch_size == smallest):
        values = [math.nan if value is None else value for value in cell.acceptance_by_depth]  # NaN: no marker, no line
        label = f"{cell.name}: accept length {cell.speculative.counters.accept_length:.2f}"
        axes.plot(
            range(1, len(values) + 1), values, marker=MARKERS[i % len(MARKERS)], color=COLOURS[i % len(COLOURS)], label=label
        )
    axes.set_ylim(0, 1.02)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("depth in the draft tree (tokens behind the root)")
    axes.set_ylabel("accepted / reached")
    axes.set_title(f"{tag}Acceptance by depth, batch size {smallest}", fontsize=10)
    _clean(axes)
    _legend_below(axes, 2)


def _legend_below(axes: Any, columns: int) -> None:
    """Outside, where no bar or line can be."""
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=columns)


def _clean(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
