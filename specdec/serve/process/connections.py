"""All connections of a server: how many there may be, those that get no further, and what the log says of them.

For one event loop.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable

from specdec.serve.metrics import FULL, IDLE, SLOW, UNREAD
from specdec.serve.process.acceptor import Acceptor, Closed
from specdec.serve.process.connection import Connection
from specdec.serve.process.descriptors import connection_limit
from specdec.serve.process.repeated_event import RepeatedEvent
from specdec.serve.state import ServerState

LIMITED = "the most that --max-connections and the limit of open files (ulimit -n) let in"


class Connections:
    """Takes connections from a socket, from when it is made until `stop`.

    make: a Connection, of which `is_refused` and `closed` are given here.  ValueError if there is room for none, or for fewer
    than the options ask for.
    """

    def __init__(self, state: ServerState, listener: socket.socket, make: Callable[..., Connection]) -> None:
        options, times = state.options, state.times
        self._state, self._make = state, make
        self._open: set[Connection] = set()
        self._idle: dict[Connection, float] = {}  # those without a request, and since when; the longest first
        self.most = connection_limit(options.max_connections)
        happens = {
            FULL: f"a connection was refused: {self.most} are open, {LIMITED}",
            IDLE: f"a connection without a request made room for another one: {self.most} were open, {LIMITED}",
            SLOW: f"a connection was closed: its request did not come within {options.read_seconds} s",
            UNREAD: f"a connection was closed: its client read nothing for {options.write_seconds} s",
        }
        self._events = {why: RepeatedEvent(what, times.quiet) for why, what in happens.items()}
        self._acceptor = Acceptor(listener, self._made, self._make_room, self.most, times)

    def look(self) -> None:
        """Closes what gets no further.  To be called every second."""
        now, options = time.monotonic(), self._state.options
        for connection in tuple(self._open):
            if (why := connection.look(now, options.read_seconds, options.write_seconds)) is not None:
                self._cut(why)
        for event in self._events.values():
            event.look()
        self._acceptor.look()

    def stop(self) -> None:
        """Takes no further ones.  Those that are open stay."""
        self._acceptor.stop()

    def opened(self, connection: Connection) -> None:
        self._open.add(connection)
        self.idle(connection)

    def idle(self, connection: Connection) -> None:
        if not connection.is_refused:
            self._idle[connection] = time.monotonic()

    def busy(self, connection: Connection) -> None:
        self._idle.pop(connection, None)

    def _make_room(self) -> bool:
        """Closes the connection that has been without a request for longest, if that is long enough."""
        latest = time.monotonic() - self._state.times.idle
        while self._idle:
            connection, since = next(iter(self._idle.items()))
            if since > latest:
                break
            del self._idle[connection]
            if connection.end_idle():
                self._cut(IDLE)
                return True
        return False

    def _made(self, is_refused: bool, closed: Closed) -> asyncio.Protocol:
        def ended() -> None:
            self._open.discard(connection)
            self._idle.pop(connection, None)
            self._state.counts.connections -= 1
            closed()

        connection = self._make(keeper=self, is_refused=is_refused, closed=ended)
        self._state.counts.connections += 1
        if is_refused:
            self._cut(FULL)
        return connection

    def _cut(self, why: str) -> None:
        self._state.counts.cut_connections[why] += 1
        self._events[why].happened()
