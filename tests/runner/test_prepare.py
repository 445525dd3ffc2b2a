"""What a load begins early: imports of kernels, in a thread that no failure leaves."""

from __future__ import annotations

import sys
import threading

import pytest

from specdec.loading.load import KERNELS
from specdec.ops.compiling import prepare as room
from specdec.ops.compiling.prepare import prepare


def test_modules_are_imported() -> None:
    """Keeps out: names of modules that are not there any more, which nobody would notice."""
    thread = prepare(KERNELS)
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive() and set(KERNELS) <= set(sys.modules)


def test_a_failure_stays_in_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a traceback on stderr, and a load that ends, because of something that is perhaps never needed."""
    seen: list[object] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    thread = prepare(("specdec.no_such_module",))
    assert thread is not None
    thread.join(60)
    assert not seen


def test_without_triton_nothing_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a thread on machines where nothing is ever compiled."""
    monkeypatch.setattr(room, "has_triton", lambda: False)
    assert prepare(KERNELS) is None
