"""What compute-sanitizer printed, by kernel."""

import re
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from toolkit.sanitize.explained import explanation

SIGN = "========="
BEGINS = re.compile(r"Invalid|Error: |Warning: |Misaligned|Program hit|Potential|Race reported|Barrier error|Uninitialized")
KERNEL = re.compile(r"\b\w+_kernel\w*")


class Findings(NamedTuple):
    """For each kernel ("" where none is named): the findings' first lines, of races those of all accesses, and how often each
    came.  Addresses are left out.

    open: what somebody has to look at.  explained: what is explained, with the reason in place of the line.
    """

    open: dict[str, Counter[str]]
    explained: dict[str, Counter[str]]


def findings(text: str, root: Path) -> Findings:
    """root: of the tree whose kernels ran."""
    found = Findings({}, {})
    blocks: list[list[str]] = []
    for line in text.splitlines():
        if not line.startswith(SIGN):
            continue
        said = line.removeprefix(SIGN)
        if BEGINS.match(said.strip()) and not said.startswith("     "):
            blocks.append([said.strip()])
        elif blocks:
            blocks[-1].append(said.strip())
    for block in blocks:
        name = next((match[0] for line in block if (match := KERNEL.search(line))), "")
        why = explanation(block, root)
        kind = found.explained if why else found.open
        others = [line for line in block[1:] if line.startswith("and ") and "access at" in line]  # what a race is with
        kind.setdefault(name, Counter())[why or on_meta(" ".join((block[0], *others)))] += 1
    return found


def on_meta(line: str) -> str:
    """A line without addresses and counts, but with the number of the line of source that it names."""
    return re.sub(r"0x[0-9a-f]+|(?<!\.py:)\b\d+", "N", line)
