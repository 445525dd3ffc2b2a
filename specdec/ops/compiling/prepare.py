"""Begins early with what takes a start's time and needs no weights: imports, and the digest of itself that Triton makes.

Reading weights hides both.  This module knows no kernel.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from importlib import import_module


def prepare(modules: Sequence[str]) -> threading.Thread:
    """Imports modules in a thread; then, if Triton is among what they import, has it digest itself.

    Whatever fails there fails again, and with its error, where it is needed.
    """
    thread = threading.Thread(target=_prepare, args=(tuple(modules),), name="specdec-prepare", daemon=True)
    thread.start()
    return thread


def _prepare(modules: Sequence[str]) -> None:
    try:
        for name in modules:
            import_module(name)
        if "triton" in sys.modules:
            from triton.runtime.cache import triton_key

            triton_key()  # Triton keeps it: each compilation's key holds it
    except Exception:  # of any kind: see `prepare`
        return
