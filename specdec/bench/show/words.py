"""Numbers and sentences that several parts of what is shown have in common.  Knows no console and no figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.text import Text

from specdec.bench.measurement import Cell, Measurement

SYNTHETIC = "SYNTHETIC"
STEAL = 0.03  # share of CPU time
SHOWN_PROMPTS = 3
STYLES = {"equal": "green", "near-tie": "yellow", "DIVERGED": "bold red", "EMPTY": "bold red", SYNTHETIC: "yellow"}


def tag_of(measurement: Measurement) -> str:
    """The mark before everything on which forced acceptance has an influence."""
    return "" if measurement.synthetic_acceptance is None else f"{SYNTHETIC}: "


def what_ran(measurement: Measurement) -> list[str]:
    """Two sentences: which models, how and where; and how much of what."""
    settings, prompts, sampling = measurement.settings, measurement.prompts, measurement.settings["sampling"]
    how = "greedy" if sampling["temperature"] == 0 else f"temperature {sampling['temperature']:g}"
    draft = f" with {short(settings['draft'])}" if settings["draft"] else ""
    return [
        f"{short(settings['target'])}{draft}, {settings['dtype']}, {settings['attention']} attention, on "
        f"{measurement.machine['runs_on']}",
        f"{count_of(prompts['count'], 'prompt')}, at most {sampling['max_tokens']} output tokens each, {how}; "
        f"{count_of(settings['repeats'], 'timed repeat')}",
    ]


def count_of(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def short(path: str) -> str:
    """The end of a path."""
    return "/".join(Path(path).parts[-2:])


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def speed_up(value: float | None) -> Text:
    if value is None:
        return Text("not shown", "bold red")
    return Text(f"{value:.2f}x", "bold red" if value < 1 else "bold green")


def outputs(cell: Cell) -> Text:
    verdict = cell.outputs.verdict
    return Text(verdict, STYLES[verdict])


def busy_with(machine: dict[str, Any]) -> str:
    """What else the machine did: another program shows as load, and another virtual machine as stolen CPU time."""
    said = []
    if (machine["load_average"] or 0) > machine["cpus_usable"]:
        said.append(f"load {machine['load_average']:.1f} on {machine['cpus_usable']} CPUs before the start")
    if machine["cpu_steal"] > STEAL:
        said.append(f"{machine['cpu_steal']:.0%} of the CPU time went to other virtual machines")
    return ", ".join(said)


def empty_outputs(empty: list[int], count: int) -> str:
    """What to do about outputs that hold nothing.  empty: numbers of their prompts, of `count`."""
    which = ", ".join(str(i + 1) for i in empty[:SHOWN_PROMPTS]) + (", ..." if len(empty) > SHOWN_PROMPTS else "")
    return (
        f"{len(empty)} of {count} outputs are empty (prompt {which}); expected text. Look at the model's "
        "weights, or if it ends at once by right: --ignore-eos"
    )
