"""Runs what README.md tells its readers to run: fences labelled `sh` (a command a line) and `python` (each a program).

Fences labelled `text` hold placeholders such as DIR, and are not run.  Everything runs as it is written, from the root of the
repository, one after the other.  Exit code 1: what failed is named.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LABELS = ("sh", "python", "text")
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.S | re.M)


class Fence(NamedTuple):
    """label: what stands after the backticks.  line: of the page, where the fence opens."""

    label: str
    body: str
    line: int


def fences(page: str) -> list[Fence]:
    """All fences of a page, in order.  ValueError for a label that says neither that it runs nor that it does not."""
    found = [Fence(match[1].strip(), match[2], page[: match.start()].count("\n") + 1) for match in FENCE.finditer(page)]
    for fence in found:
        if fence.label not in LABELS:
            raise ValueError(f"line {fence.line}: a fence must be labelled {', '.join(LABELS)}; got {fence.label!r}")
    return found


def shell_lines(body: str) -> list[str]:
    """The commands of a shell fence: one a line, a backslash at the end goes on in the next."""
    joined = body.replace("\\\n", " ")
    return [line for line in (line.strip() for line in joined.splitlines()) if line and not line.startswith("#")]


def commands(page: str, python: str) -> list[tuple[str, list[str]]]:
    """(what to print, argument list) of everything that runs."""
    found = []
    for fence in fences(page):
        if fence.label == "sh":
            found += [(line, ["bash", "-euo", "pipefail", "-c", line]) for line in shell_lines(fence.body)]
        elif fence.label == "python":
            found.append((f"the program at line {fence.line}", [python, "-P", "-c", fence.body]))
    return found


def main() -> int:
    failed = []
    for name, argv in commands((ROOT / "README.md").read_text(), str(ROOT / ".venv" / "bin" / "python")):
        began = time.perf_counter()
        done = subprocess.run(argv, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        print(f"{time.perf_counter() - began:5.1f} s  exit {done.returncode}  {name}", flush=True)
        if done.returncode or not done.stdout.strip():
            failed.append(name)
            print(done.stdout + done.stderr, flush=True)
    for name in failed:
        print(f"FAILED, or printed nothing: {name}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
