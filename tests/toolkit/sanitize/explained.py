"""Races that compute-sanitizer reports and that are none, each with the reason.

racecheck follows barriers that all warps meet at one place of a program.  Kernels whose groups of warps have a job each meet at
several places, or signal each other by mbarriers, and are reported.  A report names the lines of its two accesses.  It is
explained only if both lines read as they do here, so that a changed line is reported again.
"""

import re
from pathlib import Path
from typing import NamedTuple

ROOMS = ("specdec", "attention", "draft", "verify")


class Reason(NamedTuple):
    """lines: what both accesses' lines of source consist of."""

    lines: tuple[str, ...]
    why: str


REASONS = (
    Reason(
        (r"def \w+_kernel\(", r"gl\.warp_specialize\(", r"if TILES \* TURNS == 1:"),
        "Triton writes to shared memory what each group of warps is to do; in the PTX, `barrier.sync 1`, which all warps "
        "execute, stands between each store and each load of it",
    ),
    Reason(
        (r"sums\.store\(acc\)", r"acc \+= sums\.load\(layout\)"),
        "the group that stores its sums meets at its own barrier and arrives at an mbarrier (release), on which the group that "
        "loads them waits (acquire)",
    ),
)


def explanation(block: list[str], root: Path) -> str:
    """Why the races of a block of the tool's lines are none; empty if one of them is not explained."""
    if "Race reported" not in block[0]:
        return ""
    places = [re.search(r"access at \S+ in (\S+\.py):(\d+)", line) for line in block if "access at" in line]
    found = [place for place in places if place is not None]
    if len(found) < max(2, len(places)):
        return ""
    lines = {line_of(root, place[1], int(place[2])) for place in found}
    for reason in REASONS:
        if all(any(re.fullmatch(text, line) for text in reason.lines) for line in lines):
            return reason.why
    return ""


def line_of(root: Path, name: str, number: int) -> str:
    """A line of a kernel's file, stripped; empty if several files have the name, or none has the line."""
    files = [path for room in ROOMS for path in (root / room).rglob(name)]
    lines = files[0].read_text().splitlines() if len(files) == 1 else []
    return lines[number - 1].strip() if 0 < number <= len(lines) else ""
