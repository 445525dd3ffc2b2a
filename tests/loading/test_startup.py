"""Imports without Python's collector."""

from __future__ import annotations

import gc
import subprocess
import sys
import time

import pytest

from specdec import startup
from specdec.startup import without_collections


def run(code: str) -> str:
    """What a fresh process prints."""
    return subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=300, capture_output=True, text=True).stdout


@pytest.mark.parametrize(("began", "age"), [("", 500), ("?", 500), ("1000.5", 500), ("{:.1f}", 0), ("{:.1f}", -1)])
def test_a_script_that_became_the_command_counts_for_nothing(began: str, age: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a variable that makes a later process look old, one of another language, and a clock that was put back."""
    for comma in (".", ","):
        monkeypatch.setenv(startup.BEGAN, began.format(time.time() - age).replace(".", comma))
        assert abs(startup.process_age(500.0) - max(age, 0)) < 60
    monkeypatch.delenv(startup.BEGAN)
    assert startup.process_age(500.0) == 500


@pytest.mark.parametrize("on", [True, False])
def test_the_collector_is_as_it_was(on: bool) -> None:
    """Keeps out: a program whose collector stays off, or that had it off and gets it back on, also when an import fails."""
    was_on = gc.isenabled()
    try:
        gc.enable() if on else gc.disable()
        with pytest.raises(ImportError), without_collections():
            assert not gc.isenabled()
            raise ImportError("no such module")
        assert gc.isenabled() == on
    finally:
        gc.enable() if was_on else gc.disable()


def test_what_was_made_inside_can_be_freed() -> None:
    """Keeps out: objects that nobody needs and that are never freed, because they count as frozen."""
    run(
        "import gc, weakref\n"
        "from specdec.startup import without_collections\n"
        "class Node: pass\n"
        "with without_collections():\n"
        "    node = Node(); node.itself = node; made = weakref.ref(node); del node\n"
        "gc.collect(); assert made() is None and gc.get_freeze_count() == 0"
    )


def test_frozen_objects_stay_frozen() -> None:
    """Keeps out: a server's objects, frozen before it forks, which collections touch again."""
    run(
        "import gc; gc.freeze(); before = gc.get_freeze_count()\n"
        "from specdec.startup import without_collections\n"
        "with without_collections(): pass\n"
        "assert 0 < before == gc.get_freeze_count()"
    )


def test_the_door_imports_without_collections() -> None:
    """Keeps out: a tenth of the imports' time, in which the collector looks through what imports have just made."""
    collections, is_on = run(
        "import gc; seen = []; gc.callbacks.append(lambda phase, info: seen.append(info['generation']))\n"
        "from specdec import SpecDecoder; print(len(seen), gc.isenabled())"
    ).split()
    assert int(collections) < 10 and is_on == "True"
