"""How many files the process may have open, and how many connections that leaves room for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

try:
    import resource
except ImportError:  # Windows, whose processes have no such limit
    resource = None  # type: ignore[assignment]

WANTED = 1 << 16  # open files; more would help nobody
MAX_CONNECTIONS = 1 << 14  # where nobody says; each takes a file, and some KB of memory
REFUSED_AT_ONCE = 16  # connections beyond the most that are open while they are told so
SPARE = 24  # files that the process may yet open: kernels that are compiled, modules that are imported late
NEAREST = "nearest thing that works: ulimit -n 4096 in the shell, LimitNOFILE=65536 in a systemd unit"


@contextmanager
def raised_limit(limits: Any = resource) -> Iterator[None]:
    """Inside, the process may have as many files open as it is allowed to allow itself, up to WANTED.

    limits: Python's module of that; None: there are none.
    """
    if limits is None:
        yield
        return
    soft, hard = limits.getrlimit(limits.RLIMIT_NOFILE)
    wanted = WANTED if hard == limits.RLIM_INFINITY else min(hard, WANTED)
    raises = soft not in (limits.RLIM_INFINITY, wanted) and soft < wanted
    if raises:
        limits.setrlimit(limits.RLIMIT_NOFILE, (wanted, hard))
    try:
        yield
    finally:
        if raises:
            limits.setrlimit(limits.RLIMIT_NOFILE, (soft, hard))


def connection_limit(asked: int | None, limits: Any = resource) -> int:
    """How many connections may be open at once.  asked: by the caller; None: as many as there is room for.  limits: see above.

    ValueError if the limit of open files leaves no room for what is asked for, or for any.
    """
    limit = None if limits is None else limits.getrlimit(limits.RLIMIT_NOFILE)[0]
    if limit is None or limit == limits.RLIM_INFINITY:
        return asked or MAX_CONNECTIONS
    is_open = len(os.listdir("/dev/fd"))
    room = limit - is_open - SPARE - REFUSED_AT_ONCE
    why = f"the process may have {limit} files open, has {is_open}, and needs {SPARE + REFUSED_AT_ONCE} besides connections"
    if room < 1:
        raise ValueError(f"there is no room for connections: {why}; {NEAREST}")
    if asked is not None and asked > room:
        raise ValueError(f"max_connections={asked} is more than there is room for: {why}; nearest setting that works: {room}")
    return asked or min(room, MAX_CONNECTIONS)
