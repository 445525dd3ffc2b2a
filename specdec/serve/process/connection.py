"""One connection: uvicorn's protocol, but with an end for clients that stop sending, or reading, in the middle.

uvicorn itself closes a connection between two requests.  Here `look`, asked every second, closes one whose request's head does
not come, whose body does not end although it was answered, and whose answer is not read.  A body that is waited for has its
deadline where it is read (wire/body.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import h11
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from specdec.serve.messages.errors import body_for
from specdec.serve.metrics import SLOW, UNREAD
from specdec.serve.middleware import OPEN_PATHS
from specdec.serve.times import TIMES
from specdec.serve.wire.errors import ErrorAnswer, too_many_connections

if TYPE_CHECKING:
    from specdec.serve.process.connections import Connections

REFUSED_SECONDS = 1.0  # for the request on a connection that is one too many
CLOSE = (b"connection", b"close")


class Connection(H11Protocol):
    """is_refused: whether it is one too many, so that anything but questions about the server's state is answered with 503.

    closed: called at its end.
    """

    app: Any  # an ASGI application

    def __init__(self, *, keeper: Connections, is_refused: bool, closed: Callable[[], None], **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self.is_refused = is_refused
        self._keeper, self._closed = keeper, closed
        self._waits_for: object = None  # the request that has not come or not ended, since `_since`
        self._since = 0.0
        self._unread_bytes = 0  # of the answer, when it was last looked at
        self._unread_since = 0.0
        if is_refused:
            self._inner = self.app
            self.app = self._refuse

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._waits_for, self._since = self, time.monotonic()
        self._keeper.opened(self)

    def data_received(self, data: bytes) -> None:
        self._keeper.busy(self)
        super().data_received(data)

    def on_response_complete(self) -> None:
        self._keeper.idle(self)
        super().on_response_complete()  # which may go on with a request that came meanwhile

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._closed()

    def end_idle(self) -> bool:
        """Closes the connection if no request is under way; says whether it did."""
        is_between = self.conn.their_state in (h11.IDLE, h11.DONE) and not self.conn.trailing_data[0]
        is_idle = is_between and (self.cycle is None or self.cycle.response_complete)
        if not is_idle or self.transport.is_closing() or self.transport.get_write_buffer_size():
            return False
        self.timeout_keep_alive_handler()
        return True

    def look(self, now: float, read_seconds: float, write_seconds: float) -> str | None:
        """Closes the connection if its client has had its time.

        Says why, SLOW or UNREAD; None: it goes on, or was refused before and counts as that.
        """
        if self._unread_for(now) > write_seconds:
            self.transport.abort()
            return UNREAD
        if self.transport.is_closing():
            return None
        if self._waited_for(now) > (REFUSED_SECONDS if self.is_refused else read_seconds):
            self._end_slow()
            return None if self.is_refused else SLOW
        return None

    def _waited_for(self, now: float) -> float:
        """Seconds since a request should have gone on that the client has begun, or has connected for."""
        is_idle = self.conn.their_state is h11.IDLE
        begins = is_idle and (self.cycle is None or bool(self.conn.trailing_data[0]))
        is_answered = self.cycle is not None and self.cycle.response_complete
        if not begins and not (is_answered and self.conn.their_state is h11.SEND_BODY):
            self._waits_for = None
            return 0.0
        awaited = self.cycle or self
        if self._waits_for is not awaited:
            self._waits_for, self._since = awaited, now
        return now - self._since

    def _unread_for(self, now: float) -> float:
        """Seconds in which the client has read nothing of an answer to which nothing is added meanwhile."""
        left = self.transport.get_write_buffer_size()
        is_whole = self.cycle is None or self.cycle.response_complete
        stands = left > 0 and (self.flow.write_paused or is_whole or self.transport.is_closing())
        if not stands or left < self._unread_bytes or not self._unread_bytes:
            self._unread_since = now
        self._unread_bytes = left if stands else 0
        return now - self._unread_since if stands else 0.0

    def _end_slow(self) -> None:
        """Says why where a request has begun, and closes."""
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0] and self.conn.our_state is h11.IDLE:
            headers = [CLOSE, (b"content-length", b"0")]
            answer = self.conn.send(h11.Response(status_code=408, headers=headers, reason=b"Request Timeout"))
            self.transport.write(answer or b"")
        self.transport.close()

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers for a server that is full; what asks for its state gets it all the same."""

        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), CLOSE]
            await send(message)

        if scope["path"] in OPEN_PATHS:
            await self._inner(scope, receive, closing)
        else:
            error = too_many_connections()
            await ErrorAnswer(error, body_for(scope["path"], error), TIMES.discard)(scope, receive, send)
