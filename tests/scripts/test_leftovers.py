"""What a run of several files keeps of the first one."""

import os
import subprocess
import sys
from pathlib import Path

from toolkit.paths import ROOT

FIRST = """
import builtins, gc, weakref
import pytest

class Ring:
    def __init__(self, name):
        self.itself = self
        setattr(builtins, name, weakref.ref(self))

@pytest.fixture(scope="module")
def of_file():
    yield Ring("of_file")

@pytest.fixture
def of_test():
    yield Ring("of_test")

def test_first(of_file, of_test):
    assert gc.get_freeze_count() == 0
"""
SECOND = """
import builtins, gc

def test_second():
    gc.collect()
    assert gc.get_freeze_count() > 0 and builtins.of_file() is None and builtins.of_test() is None
"""


def test_fixtures_of_a_file_can_be_freed(tmp_path: Path) -> None:
    """Keeps out: decoders of a file's last test, which pytest still holds at its end, that are frozen and never freed."""
    files = [tmp_path / "test_first.py", tmp_path / "test_second.py"]
    for file, text in zip(files, (FIRST, SECOND), strict=True):
        file.write_text(text)
    options = ["-q", "-p", "toolkit.suite.leftovers", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *map(str, files)]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
