"""The times of the HTTP door that no flag sets."""

from __future__ import annotations

from typing import NamedTuple


class Times(NamedTuple):
    """Seconds.

    look: between two looks at all connections.
    idle: without a request, after which a connection may have to make room for another one.
    quiet: without a further time, after which something that the log tells of is over.
    retry: after the system could not give a file for a connection.
    discard: of a body that nobody reads, before its connection is closed.
    failed: from the engine's failure to the end of the server, so that health checks and callers read the reason.
    last: for requests that were cut off to be answered, and for connections to close.
    """

    look: float = 1.0
    idle: float = 1.0
    quiet: float = 5.0
    retry: float = 0.5
    discard: float = 2.0
    failed: float = 5.0
    last: float = 3.0


TIMES = Times()
