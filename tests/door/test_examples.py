"""The examples run as they are written, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MOST_LINES = 60


def test_there_are_examples_and_they_are_short():
    """Keeps out: an empty list of examples, which would pass, and examples that nobody reads to the end."""
    assert len(EXAMPLES) >= 5
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES}
    assert {name: lines for name, lines in lengths.items() if lines >= MOST_LINES} == {}


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, tmp_path: Path) -> None:
    """Keeps out: an example of an interface that has changed since it was written."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-P", str(path)], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and done.stderr == ""
