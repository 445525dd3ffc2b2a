"""What compute-sanitizer printed, by kernel."""

import re
from collections import Counter

SIGN = "========="
BEGINS = re.compile(r"Invalid|Error: |Warning: |Misaligned|Program hit|Potential|Race reported|Barrier error|Uninitialized")
KERNEL = re.compile(r"\b\w+_kernel\w*")


def findings(text: str) -> dict[str, Counter[str]]:
    """For each kernel ("" where none is named): the first lines of its findings, numbers left out, and how often each came."""
    found: dict[str, Counter[str]] = {}
    blocks: list[list[str]] = []
    for line in text.splitlines():
        if not line.startswith(SIGN):
            continue
        said = line.removeprefix(SIGN)
        if BEGINS.match(said.strip()) and not said.startswith("     "):
            blocks.append([said.strip()])
        elif blocks:
            blocks[-1].append(said.strip())
    for first, *rest in blocks:
        name = next((match[0] for line in (first, *rest) if (match := KERNEL.search(line))), "")
        found.setdefault(name, Counter())[re.sub(r"0x[0-9a-f]+|\d+", "N", first)] += 1
    return found
