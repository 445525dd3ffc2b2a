"""Takes connections from the listening socket, no more than there is room for.

asyncio's own loop of `accept` tries again at once where no file can be opened, thousands of times a second, each with a line in
the log.  This one keeps room for a few connections beyond the most that are served: they are told that the server is full.
What comes beyond them stays with the system until one has gone.

Knows no HTTP: what a connection is for is its protocol's.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from specdec.serve.process.descriptors import REFUSED_AT_ONCE
from specdec.serve.process.repeated_event import RepeatedEvent
from specdec.serve.times import TIMES, ServeTimes

Closed = Callable[[], None]  # what a connection's protocol calls when the connection has ended
BACKLOG = 2048  # connections that the system keeps until they are accepted; it may keep fewer
AT_ONCE = 64  # connections accepted in one turn of the event loop


class Acceptor:
    """Accepts what comes to one socket, on the running event loop.

    make: the protocol of a new connection, from whether it is one too many, and what it must call at its end.
    make_room: closes a connection that is of no use now, if there is one, and says whether there was.
    most: connections that are served at once.  open: those that are open, with those that are refused or about to close.
    """

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[bool, Closed], asyncio.Protocol],
        make_room: Callable[[], bool],
        most: int,
        times: ServeTimes = TIMES,
    ) -> None:
        self.open, self.most = 0, most
        self._listener, self._make, self._make_room, self._retry = listener, make, make_room, times.retry
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[object]] = set()
        self._failures = RepeatedEvent("a connection could not be accepted", times.quiet)
        self._is_waiting = self._is_stopped = False
        listener.setblocking(False)
        listener.listen(BACKLOG)
        self._loop.add_reader(listener, self._accept)

    def look(self) -> None:
        """To be called now and then: says in the log what is over, and makes room for those that wait."""
        self._failures.look()
        if self._is_waiting:
            self._make_room()

    def stop(self) -> None:
        """Accepts nothing more.  The socket stays open."""
        self._is_stopped = True
        self._loop.remove_reader(self._listener)

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            if self.open >= self.most + REFUSED_AT_ONCE:
                self._make_room()
                return self._wait()
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return None
            except OSError as error:  # no file or no memory for it, in the process or in the system
                self._failures.happened(f": {error.strerror}; {self.open} are open")
                self._loop.call_later(self._retry, self._go_on)
                return self._wait()
            connection.setblocking(False)
            self.open += 1
            protocol = self._make(self.open > self.most and not self._make_room(), self._closed)
            task = self._loop.create_task(self._loop.connect_accepted_socket(lambda p=protocol: p, connection))  # type: ignore[misc]
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return None

    def _closed(self) -> None:
        self.open -= 1
        if self._is_waiting:  # after the system has its file back
            self._loop.call_soon(self._go_on)

    def _wait(self) -> None:
        self._is_waiting = True
        self._loop.remove_reader(self._listener)

    def _go_on(self) -> None:
        if self._is_waiting and not self._is_stopped:
            self._is_waiting = False
            self._loop.add_reader(self._listener, self._accept)
