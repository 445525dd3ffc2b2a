"""Lets several threads load compiled kernels at once, and each gets its own launcher.

Up to version 3.6 Triton loads a small C module with each kernel, which passes the kernel's arguments on, and all of these
modules have one name.  Python keeps one module of a name: where one of them is loaded a second time, Python puts its functions
into the module that was loaded last, which another thread may just be about to read.  Its kernel then has the launcher of
another kernel, with other arguments.  So a load gives a copy here, and no two threads load at one time.

This module knows no kernel.
"""

from __future__ import annotations

import threading
from types import ModuleType

_loading = threading.Lock()


def separate_launchers() -> None:
    """Changes how Triton loads its C modules, once for the process."""
    from triton.runtime import build

    load = getattr(build, "_load_module_from_path", None)
    if load is None or getattr(load, "gives_copies", False):  # a Triton without it builds its launchers in another way
        return

    def load_copy(name: str, path: str) -> ModuleType:
        copy = ModuleType(name)
        with _loading:
            copy.__dict__.update(load(name, path).__dict__)
        return copy

    load_copy.gives_copies = True  # type: ignore[attr-defined]
    build._load_module_from_path = load_copy
