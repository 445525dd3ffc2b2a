"""A file's leftovers are no garbage to look for in the next file."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from toolkit.paths import ROOT

FILE = pytest.StashKey[Path]()  # the one of the last test


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """What a file of tests leaves is imports and caches, in which the next file's decoders would look for garbage, each when it
    is closed.  In the server's folder decoders outlive a file, and a test watches what becomes of them; so do tests on a GPU,
    whose files take turns in a process.

    Before the next file's first test, and not after the last one of a file, whose fixtures pytest itself holds at its end: what
    is frozen then would never be found.
    """
    stash = item.config.stash
    last, stash[FILE] = stash.get(FILE, item.path), item.path
    if last != item.path and not torch.cuda.is_available() and ROOT / "tests" / "serve" not in last.parents:
        gc.collect()
        gc.freeze()
