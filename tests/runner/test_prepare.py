"""What a load begins early: imports of kernels and tokenizers, in threads that no failure leaves."""

from __future__ import annotations

import sys
import threading

import pytest

from specdec.loading.load import KERNELS, TOKENIZERS
from specdec.ops.compiling.prepare import prepare


def test_modules_are_imported() -> None:
    """Keeps out: names of modules that are not there any more, which nobody would notice."""
    for modules in (KERNELS, TOKENIZERS):
        thread = prepare(modules)
        thread.join(60)
        assert not thread.is_alive() and set(modules) <= set(sys.modules)


def test_a_failure_stays_in_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a traceback on stderr, and a load that ends, because of something that is perhaps never needed."""
    seen: list[object] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    thread = prepare(("specdec.no_such_module",))
    thread.join(60)
    assert not thread.is_alive() and not seen
