"""Begins early with what comes before the first compilation: imports, and the digest of itself that Triton makes.

Both take tenths of a second, which loading weights hides.  This module knows no kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from importlib import import_module

from specdec.ops.launch import has_triton


def prepare(modules: Sequence[str]) -> threading.Thread | None:
    """Imports modules of kernels in a thread, and has Triton digest itself.  None: Triton is not installed.

    Whatever fails there fails again, and with its error, where it is needed.
    """
    if not has_triton():
        return None
    thread = threading.Thread(target=_prepare, args=(tuple(modules),), name="specdec-prepare", daemon=True)
    thread.start()
    return thread


def _prepare(modules: Sequence[str]) -> None:
    try:
        from triton.runtime.cache import triton_key

        triton_key()  # kept by Triton; every compilation's key holds it
        for name in modules:
            import_module(name)
    except Exception:  # of any kind: see `prepare`
        return
