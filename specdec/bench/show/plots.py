"""One figure of a finished measurement: speed of both sides, phases of a round, acceptance by depth, and what a round gives for
what it costs.  Bars differ by hatches too, for readers who see or print no colours.  Needs matplotlib.
"""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from statistics import median
from typing import Any

from specdec.bench.measurement import Cell, Measurement
from specdec.bench.show.legend import phases_shown
from specdec.bench.show.words import count_of, tag_of, what_ran

BASELINE_COLOUR, NOISE_COLOUR = "#999999", "#dddddd"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")  # Okabe and Ito: safe for colour-blind readers
PHASE_COLOURS = ("#9AD0F3", "#0072B2", "#004165", "#E69F00", "#cccccc")
MARKERS = "osD^vP"
HATCHES, PHASE_HATCHES = ("", "//", "\\\\", "xx", "..", "--"), ("", "//", "", "..", "xx")
SIDE_INCHES, BAR_INCHES, LINES_INCHES, HEIGHT_INCHES = 3.2, 0.4, 4.6, 10.2
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


def draw(measurement: Measurement) -> Any:
    """The figure: bars of tok/s, a round's milliseconds by phase, acceptance by depth, and tokens of a round against its cost;
    what ran in the title.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cells = measurement.cells
    widths = (
        max(LINES_INCHES, SIDE_INCHES + BAR_INCHES * 2 * len(cells)),
        max(LINES_INCHES, SIDE_INCHES + BAR_INCHES * len(cells)),
    )
    figure = Figure(figsize=(sum(widths), HEIGHT_INCHES), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    figure.suptitle(_title(measurement, int(sum(widths) * TITLE_CHARACTERS_PER_INCH)), fontsize=10)
    if cells:
        (speed, phases), (acceptance, worth) = figure.subplots(2, 2, width_ratios=widths)
        tag = tag_of(measurement)
        _speed(speed, measurement, tag)
        _phases(phases, measurement, tag)
        _acceptance(acceptance, cells, tag)
        _worth(worth, cells, tag)
    return figure


def _title(measurement: Measurement, width: int) -> str:
    """What ran, where, and how much of it."""
    forced, (models, amount) = measurement.synthetic_acceptance, what_ran(measurement)
    many = measurement.settings["repeats"] > 1
    lines = [models, amount + (" (bars: median, whiskers: fastest and slowest)" if many else "")]
    if forced is not None:
        lines.insert(0, f"SYNTHETIC: acceptance forced to {', '.join(f'{p:g}' for p in forced)} by depth")
    lines += [f"batch {failure.batch_size}, {failure.name}: FAILED" for failure in measurement.failures]
    return "\n".join(part for line in lines for part in textwrap.wrap(line, width))


def _speed(axes: Any, measurement: Measurement, tag: str) -> None:
    """Bars of tok/s, a group for each batch size.  Each shape stands beside its own baseline, with its speed-up above it.

    A band through the group says how far the baselines, which do the same work, lie apart: that much is noise.
    """
    cells = measurement.cells
    sizes = list(dict.fromkeys(cell.batch_size for cell in cells))
    names = list(dict.fromkeys(cell.name for cell in cells))
    width, named = 0.84 / (2 * len(names)), set[str]()
    for group, size in enumerate(sizes):
        if len(rates := measurement.baselines(size)) > 1:
            label = "noise: all passes of plain decoding lie in the band"
            edges = [group - 0.46, group + 0.46]
            axes.fill_between(edges, min(rates), max(rates), color=NOISE_COLOUR, lw=0, label="_" if group else label)
    for cell in cells:
        group, i = sizes.index(cell.batch_size), names.index(cell.name)
        x = group - 0.42 + width * (2 * i + 0.5)
        label = "" if cell.name in named else f"specdec, S,k,nd = {cell.name}"
        again = ", measured again for each shape" if len(names) > 1 else ""
        _bar(axes, x, cell.baseline.rates, width, BASELINE_COLOUR, "" if named else f"plain decoding{again}")
        _bar(axes, x + width, cell.speculative.rates, width, COLOURS[i % len(COLOURS)], label, HATCHES[i % len(HATCHES)])
        named.add(cell.name)
        wrong = {"DIVERGED": "outputs\ndiffer", "EMPTY": "outputs\nempty"}
        note = wrong.get(cell.outputs.verdict, f"{cell.speed_up or 0:.2f}x")
        _note(axes, note, x + width, max(cell.speculative.rates))
    tokens = [sum(cell.speculative.output_tokens) for cell in cells]
    spread = f"{min(tokens):,}" if min(tokens) == max(tokens) else f"{min(tokens):,} to {max(tokens):,}"
    axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
    axes.set_xlabel(f"batch size  ({spread} output tokens timed a bar)")
    axes.set_ylabel("output tokens per second")
    axes.set_title(f"{tag}Speed\n(the numbers: speed-up over the baseline beside it)", fontsize=10)
    axes.margins(y=0.12)
    axes.set_ylim(bottom=0)
    _clean(axes)
    _legend_below(axes, 2)


def _phases(axes: Any, measurement: Measurement, tag: str) -> None:
    """Stacked bars of milliseconds: for each batch size a plain step, and a round of each shape by its phases."""
    names, places, seen, at = phases_shown(measurement), list[float](), set[int](), 0.0
    labels = list[str]()
    for cell in measurement.cells:
        if cell.batch_size not in seen:
            at += 0.6 if seen else 0.0
            label = "_" if seen else "plain step"
            axes.bar(at, cell.baseline.phases.ms_per_round, 0.8, color=BASELINE_COLOUR, label=label)
            seen.add(cell.batch_size)
            places.append(at)
            labels.append(f"plain, batch {cell.batch_size}")
            at += 1
        bottom = 0.0
        for name, colour, hatch in zip(names, PHASE_COLOURS, PHASE_HATCHES, strict=False):
            ms = max(0.0, cell.speculative.phases.ms(name))
            label = name if len(places) == 1 else "_"
            axes.bar(at, ms, 0.8, bottom=bottom, color=colour, hatch=hatch, edgecolor="white", lw=0, label=label)
            bottom += ms
        _note(axes, f"{cell.speculative.counters.accept_length:.2f}", at, bottom)
        places.append(at)
        labels.append(f"{cell.name}, batch {cell.batch_size}")
        at += 1
    axes.set_xticks(places, labels, rotation=50, ha="right", rotation_mode="anchor", fontsize=8)
    axes.set_ylabel("milliseconds, each phase waited for")
    axes.set_title(f"{tag}A step, and a round by phase\n(the numbers: tokens that a round gives a sequence)", fontsize=10)
    axes.margins(y=0.25)  # room for the legend
    _clean(axes)
    axes.legend(frameon=False, fontsize=8, loc="upper center", ncols=3)


def _note(axes: Any, text: str, x: float, top: float) -> None:
    """A number above a bar."""
    axes.annotate(text, (x, top), (0, 4), textcoords="offset points", ha="center", va="bottom", fontsize=8)


def _bar(axes: Any, x: float, rates: list[float], width: float, colour: str, label: str, hatch: str = "") -> None:
    """The repeats' median, and whiskers to their extremes."""
    middle = median(rates)
    spread = [[middle - min(rates)], [max(rates) - middle]] if len(rates) > 1 else None
    style = {"color": colour, "hatch": hatch, "edgecolor": "white", "lw": 0, "label": label or "_"}
    axes.bar(x, middle, width * 0.92, yerr=spread, capsize=3, error_kw={"elinewidth": 1}, **style)


def _acceptance(axes: Any, cells: list[Cell], tag: str) -> None:
    """Lines of the smallest batch: acceptance doesn't depend on the batch size."""
    smallest = min(cell.batch_size for cell in cells)
    for i, cell in enumerate(cell for cell in cells if cell.batch_size == smallest):
        values = [math.nan if value is None else value for value in cell.acceptance_by_depth]  # NaN: no marker, no line
        counters = cell.speculative.counters
        label = f"{cell.name}: accept length {counters.accept_length:.2f} over {count_of(counters.rounds, 'round')}"
        style = {"marker": MARKERS[i % len(MARKERS)], "color": COLOURS[i % len(COLOURS)]}
        axes.plot(range(1, len(values) + 1), values, label=label, **style)
    axes.set_ylim(0, 1.04)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("depth in the draft tree (tokens after the root)")
    axes.set_ylabel("accepted / reached")
    axes.set_title(f"{tag}Acceptance by depth, batch size {smallest}", fontsize=10)
    _clean(axes)
    _legend_below(axes, 1)


def _worth(axes: Any, cells: list[Cell], tag: str) -> None:
    """A point for each cell: tokens that a round gives a sequence, against what it costs in plain steps.

    Above the line on which both are equal, speculation is the faster one while the batch stays full.
    """
    names, most = list(dict.fromkeys(cell.name for cell in cells)), 1.0
    for cell in cells:
        i, step = names.index(cell.name), cell.baseline.phases.ms_per_round
        if not step:
            continue
        cost, tokens = cell.speculative.phases.ms_per_round / step, cell.speculative.counters.accept_length
        style = {"marker": MARKERS[i % len(MARKERS)], "color": COLOURS[i % len(COLOURS)], "ls": ""}
        axes.plot([cost], [tokens], label=cell.name if cell is next(c for c in cells if c.name == cell.name) else "_", **style)
        axes.annotate(f"batch {cell.batch_size}", (cost, tokens), (6, -3), textcoords="offset points", fontsize=8)
        most = max(most, cost, tokens)
    edge = 1.15 * most
    axes.plot([0, edge], [0, edge], color="#444444", ls="--", lw=1, label="break even")
    axes.set_xlim(0, edge)
    axes.set_ylim(0, edge)
    axes.set_xlabel("cost of a round, in plain steps of the same batch")
    axes.set_ylabel("tokens that a round gives a sequence")
    axes.set_title(f"{tag}What a round gives for what it costs\n(above the line speculation is faster)", fontsize=10)
    _clean(axes)
    _legend_below(axes, 2)


def _legend_below(axes: Any, columns: int) -> None:
    """Outside the axes, where no bar or line can be."""
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=columns)


def _clean(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
