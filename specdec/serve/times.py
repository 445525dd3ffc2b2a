"""The times of the HTTP server that no flag sets."""

from __future__ import annotations

from typing import NamedTuple


class ServeTimes(NamedTuple):
    """Seconds."""

    look: float = 1.0  # between two looks at all connections
    idle: float = 1.0  # without a request, after which a connection may have to make room for another one
    quiet: float = 5.0  # without a further time, after which something that the log tells of is over
    retry: float = 0.5  # after the system could not give a file for a connection
    discard: float = 2.0  # of a body that nobody reads, before its connection is closed
    failed: float = 5.0  # from the engine's failure to the end of the server, so that health checks and callers read the reason
    last: float = 3.0  # for requests that were cut off to be answered, and for connections to close


TIMES = ServeTimes()
