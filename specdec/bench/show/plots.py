"""One figure of a finished measurement: speed of both sides, and acceptance by depth.  Needs matplotlib."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from statistics import median
from typing import Any

from specdec.bench.measurement import Cell, Measurement

BASELINE_COLOUR = "#999999"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")  # Okabe and Ito: safe for colour-blind readers
MARKERS = "osD^vP"
BAR_INCHES, ACCEPTANCE_INCHES, LEAST_INCHES, HEIGHT_INCHES = 0.42, 5.0, 10.5, 5.2
TITLE_CHARACTERS_PER_INCH = 11


def require(path: Path) -> None:
    """ValueError if matplotlib is absent or can't write such a file; asked before a long run, not after it."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise ValueError("--plot needs matplotlib, which is not installed: pip install matplotlib") from error
    endings = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in endings:
        raise ValueError(f"--plot must end in one of .{', .'.join(sorted(endings))}; got {str(path)!r}")


def write_plot(measurement: Measurement, path: Path) -> None:
    """Writes the figure in the format that the path's ending names."""
    draw(measurement).savefig(path)


def draw(measurement: Measurement) -> Any:
    """The figure: bars of tok/s on the left, lines of acceptance on the right, counts in the title."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = measurement.cells
    width = max(LEAST_INCHES, ACCEPTANCE_INCHES + 1 + BAR_INCHES * 2 * len(cells))
    figure = Figure(figsize=(width, HEIGHT_INCHES), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    figure.suptitle(_title(measurement, int(width * TITLE_CHARACTERS_PER_INCH)), fontsize=10)
    if cells:
        left, right = figure.subplots(1, 2, width_ratios=(width - ACCEPTANCE_INCHES, ACCEPTANCE_INCHES))
        tag = "" if measurement.synthetic_acceptance is None else "SYNTHETIC: "
        _speed(left, cells, tag)
        _acceptance(right, cells, tag)
    return figure


def _title(measurement: Measurement, width: int) -> str:
    """What ran, where, and how much of it."""
    settings, prompts, sampling = measurement.settings, measurement.prompts, measurement.settings["sampling"]
    forced, repeats = measurement.synthetic_acceptance, settings["repeats"]
    how = "greedy" if sampling["temperature"] == 0 else f"temperature {sampling['temperature']:g}"
    lines = [
        f"{_short(settings['target'])} with {_short(settings['draft'])}, {settings['dtype']}, "
        f"{settings['attention']} attention, on {measurement.machine['runs_on']}",
        f"{_count(prompts['count'], 'prompt')}, at most {sampling['max_tokens']} output tokens each, {how}; "
        f"{_count(repeats, 'timed repeat')}" + (" (bars: median, whiskers: fastest and slowest)" if repeats > 1 else ""),
    ]
    if forced is not None:
        lines.insert(0, f"SYNTHETIC: acceptance forced to {', '.join(f'{p:g}' for p in forced)} by depth")
    lines += [f"batch {failure.batch_size}, {failure.name}: FAILED" for failure in measurement.failures]
    return "\n".join(part for line in lines for part in textwrap.wrap(line, width))


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _short(path: str) -> str:
    return "/".join(Path(path).parts[-2:])


def _speed(axes: Any, cells: list[Cell], tag: str) -> None:
    """Bars of tok/s, a group for each batch size.  Each shape stands beside its own baseline, with its speed-up above it."""
    sizes = list(dict.fromkeys(cell.batch_size for cell in cells))
    names = list(dict.fromkeys(cell.name for cell in cells))
    width, named = 0.84 / (2 * len(names)), set[str]()
    for cell in cells:
        group, i = sizes.index(cell.batch_size), names.index(cell.name)
        x = group - 0.42 + width * (2 * i + 0.5)
        label = "" if cell.name in named else f"specdec, S,k,nd = {cell.name}"
        _bar(axes, x, cell.baseline.rates, width, BASELINE_COLOUR, "" if named else "its own baseline")
        _bar(axes, x + width, cell.speculative.rates, width, COLOURS[i % len(COLOURS)], label)
        named.add(cell.name)
        note = {"DIVERGED": "outputs\ndiffer", "EMPTY": "outputs\nempty"}.get(
            cell.outputs.verdict, f"{cell.speed_up or 0:.2f}x"
        )
        top = max(cell.speculative.rates)
        axes.annotate(note, (x + width, top), (0, 4), textcoords="offset points", ha="center", va="bottom", fontsize=8)
    tokens = [sum(cell.speculative.output_tokens) for cell in cells]
    spread = f"{min(tokens):,}" if min(tokens) == max(tokens) else f"{min(tokens):,} to {max(tokens):,}"
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_xlabel(f"batch size  ({spread} output tokens timed a bar)")
    axes.set_ylabel("output tokens per second")
    axes.set_title(f"{tag}Speed (the numbers: speed-up over the baseline beside it)", fontsize=10)
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)
    _clean(axes)
    _legend_below(axes, 3)


def _bar(axes: Any, x: float, rates: list[float], width: float, colour: str, label: str) -> None:
    """The repeats' median, and whiskers to their extremes."""
    middle = median(rates)
    spread = [[middle - min(rates)], [max(rates) - middle]] if len(rates) > 1 else None
    axes.bar(x, middle, width * 0.92, color=colour, label=label or "_", yerr=spread, capsize=3, error_kw={"elinewidth": 1})


def _acceptance(axes: Any, cells: list[Cell], tag: str) -> None:
    """Lines of the smallest batch: acceptance doesn't depend on the batch size."""
    smallest = min(cell.batch_size for cell in cells)
    for i, cell in enumerate(cell for cell in cells if cell.batch_size == smallest):
        values = [math.nan if value is None else value for value in cell.acceptance_by_depth]  # NaN: no marker, no line
        counters = cell.speculative.counters
        label = f"{cell.name}: accept length {counters.accept_length:.2f} over {_count(counters.rounds, 'round')}"
        style = {"marker": MARKERS[i % len(MARKERS)], "color": COLOURS[i % len(COLOURS)]}
        axes.plot(range(1, len(values) + 1), values, label=label, **style)
    axes.set_ylim(0, 1.04)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("depth in the draft tree (tokens after the root)")
    axes.set_ylabel("accepted / reached")
    axes.set_title(f"{tag}Acceptance by depth, batch size {smallest}", fontsize=10)
    _clean(axes)
    _legend_below(axes, 1)


def _legend_below(axes: Any, columns: int) -> None:
    """Outside the axes, where no bar or line can be."""
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=columns)


def _clean(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
