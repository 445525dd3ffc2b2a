"""The screen after a benchmark: a verdict, one table, what to try next; on demand every table and every word's meaning.

Knows no model and measures nothing.
"""

from __future__ import annotations

from textwrap import wrap

from rich.console import Console
from rich.text import Text

from specdec.bench.measurement import Measurement
from specdec.bench.show.advice import advice
from specdec.bench.show.bars import print_bars
from specdec.bench.show.budget_report import print_budgets
from specdec.bench.show.details import plain_table, print_details, speed_table
from specdec.bench.show.legend import print_legend
from specdec.bench.show.verdict import verdict
from specdec.bench.show.words import busy_with, what_ran

MAX_ADVICE = 4  # what is most worth trying comes first


def print_report(measurement: Measurement, console: Console, *, details: bool = False, explain: bool = False) -> None:
    """Everything but the JSON.  details: with every table.  explain: with what the words mean."""
    for line in verdict(measurement):
        console.print(line)
    console.print()
    if details:
        print_details(measurement, console)
    else:
        _print_table(measurement, console)
    print_budgets(measurement, console)
    if tips := advice(measurement)[:MAX_ADVICE]:
        console.print(Text("\nWhat to try next", "bold"))
        for tip in tips:
            lines = wrap(f"{tip.what}: {tip.why}", console.width, initial_indent="  ", subsequent_indent="    ")
            text = Text("\n".join(lines))
            text.stylize("cyan", 0, 2 + len(tip.what))
            console.print(text)
    if explain:
        print_legend(measurement, console)
    more = [
        *(() if details else ("--details: phases, acceptance by depth, memory",)),
        *(() if explain else ("--explain: what the words mean",)),
        "--json FILE: all counters",
    ]
    console.print(Text("\n" + "; ".join(more), "dim"))


def _print_table(measurement: Measurement, console: Console) -> None:
    """What ran, and how fast."""
    if measurement.cells:
        speed_table(measurement.cells, predicted=False).print(console)
        print_bars(measurement.cells, console)
    if measurement.plain_cells:
        plain_table(measurement.plain_cells, with_memory=False).print(console)
    console.print()
    for line in what_ran(measurement):
        console.print(Text(line, "dim"))
    if busy := busy_with(measurement.machine):
        console.print(Text(f"BUSY: {busy}: these timings suffer from it", "bold yellow"))
