"""Races that compute-sanitizer reports and that are none, each with the reason.

racecheck follows barriers that all warps meet at one place of a program.  Kernels whose groups of warps have a job each meet at
several places, or signal each other by mbarriers, and are reported.  A report names the line of one access, and those of all
others that race with it.  It is explained only if each pair of lines reads as it does here, so that a changed line is reported
again.
"""

import re
from pathlib import Path
from typing import NamedTuple

ROOMS = ("specdec", "attention", "draft", "verify")


class Reason(NamedTuple):
    """one, other: what the lines of the two accesses consist of, in either order.  within: what stands in their file."""

    one: str
    other: str
    why: str
    within: str = ""


_JOBS = r"def \w+_kernel\(|gl\.warp_specialize\(|if TILES \* TURNS == 1:"
_LENGTHS = r"qk_MM, kk_MM = qk_MM \* q_length.*|tl\.store\(own \+ 2 \* P \* P .*"
REASONS = (
    Reason(
        _JOBS,
        _JOBS,
        "Triton writes to shared memory what each group of warps is to do; in the PTX, `barrier.sync 1`, which all warps "
        "execute, stands between each store and each load of it",
        within="gl.warp_specialize(",
    ),
    Reason(
        r"sums\.store\(acc\)",
        r"acc \+= sums\.load\(layout\)",
        "the group that stores its sums meets at its own barrier and arrives at an mbarrier (release), on which the group that "
        "loads them waits (acquire)",
    ),
    Reason(
        r"tl\.store\(out \+ \(row \* H \+ h\) \* V \+ v, out_V.*",
        r"tl\.store\(out \+ \(row \* H \+ h\) \* V \+ v, out_V.*",
        "a program of fewer columns than threads: several threads hold the same numbers, and write the same",
        within="tl.sum(q_K * k_K, 0)",  # in the kernels of trees of one node
    ),
    Reason(
        _LENGTHS,
        _LENGTHS,
        "a number a node, and fewer nodes than threads: several threads hold the same lengths, and write the same",
        within="def kimi_nodes_kernel(",
    ),
)


def explanation(block: list[str], root: Path) -> str:
    """Why the races of a block of the tool's lines are none; empty if one of them is not explained."""
    if "Race reported" not in block[0]:
        return ""
    accesses = [line for line in block if "access at" in line]
    found = [place for line in accesses if (place := re.search(r"access at \S+ in (\S+\.py):(\d+)", line))]
    if len(found) < max(2, len(accesses)):
        return ""
    first, *others = [(_source(root, place[1]), int(place[2])) for place in found]
    whys = {next((reason.why for reason in REASONS if _fits(reason, first, other)), "") for other in others}
    return "" if "" in whys else "; ".join(sorted(whys))


def _fits(reason: Reason, first: tuple[str, int], other: tuple[str, int]) -> bool:
    lines = _line(*first), _line(*other)
    return all(reason.within in source for source, _ in (first, other)) and any(
        re.fullmatch(reason.one, one) and re.fullmatch(reason.other, two) for one, two in (lines, lines[::-1])
    )


def _source(root: Path, name: str) -> str:
    """A kernel's file; empty if there is none of that name, or several."""
    files = [path for room in ROOMS for path in (root / room).rglob(name)]
    return files[0].read_text() if len(files) == 1 else ""


def _line(source: str, number: int) -> str:
    lines = source.splitlines()
    return lines[number - 1].strip() if 0 < number <= len(lines) else ""
