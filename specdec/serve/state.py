"""What all requests of one server share: the decoder, the limits, the counters, and whether the server is shutting down."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive

from specdec.async_decoder import AsyncSpecDecoder
from specdec.prompts.replies import form_of
from specdec.serve.access.checks import HostCheck, OriginCheck
from specdec.serve.limits import KeyCheck, Queue
from specdec.serve.log import ENDS, write_line
from specdec.serve.options import ServeOptions
from specdec.serve.times import TIMES, ServeTimes
from specdec.serve.wire.body import parse_object, read_body
from specdec.serve.wire.errors import ClientGone, cut_off, engine_failed, shutting_down

OTHER_PATH = "other"  # of a request for what is not there
LARGE_BODY = 1 << 16  # bytes of one that may hold enough to keep the event loop busy
T = TypeVar("T")


@dataclass
class Counts:
    """What a server counts besides its engine."""

    responses: Counter[int] = field(default_factory=Counter)  # by status
    requests: Counter[tuple[str, ...]] = field(default_factory=Counter)  # that have ended, by path and end
    connections: int = 0  # how many are open
    cut_connections: Counter[str] = field(default_factory=Counter)  # that the server has refused or closed, by why

    def know(self, paths: Iterable[str]) -> None:
        """Requests of these paths are counted apart; callers choose all others, of which there may be any number."""
        self.requests.update({(path, end): 0 for path in (*paths, OTHER_PATH) for end in ENDS})

    def ended(self, path: str, status: int, end: str) -> None:
        """A request has ended.  status: of its answer.  end: one of ENDS."""
        self.responses[status] += 1
        self.requests[path if (path, end) in self.requests else OTHER_PATH, end] += 1


class ServerState:
    """The state of one server.  All of it belongs to the server's event loop.

    is_draining: whether the server takes no more requests.
    max_seq_len: the most tokens of a prompt and its output.  piece: the text of a token.
    form: how the model writes calls of tools and thoughts.
    """

    def __init__(self, decoder: AsyncSpecDecoder, options: ServeOptions, times: ServeTimes = TIMES) -> None:
        self.decoder, self.options, self.times = decoder, options, times
        self.key_check, self.origins = KeyCheck(options.api_key), OriginCheck(options.origins)
        self.host_check: HostCheck | None = None  # made by a server that listens itself
        if (auditor := decoder.decoder.auditor) is not None:
            auditor.keeps_texts = options.log_prompts
            auditor.tell = lambda said: write_line("server", {"level": "error", "message": said})
        settings = decoder.decoder.settings
        self.max_seq_len, self.piece = settings.max_seq_len, decoder.decoder.tokenizer.piece
        self.form = form_of(decoder.decoder.tokenizer, options.tool_parser, options.reasoning_parser)
        self.queue = Queue(settings.options.max_batch_size + options.max_queue)
        self.created = int(time.time())
        self.counts = Counts()
        self.is_draining = False
        self._cut_off: asyncio.Future[None] | None = None

    def check_open(self) -> None:
        """ApiError 503 if no request can be taken."""
        if self.is_draining:
            raise shutting_down()
        if (failure := self.decoder.failure) is not None:
            raise engine_failed(failure)

    async def read(self, request: Request, reader: Callable[[dict[str, Any]], T]) -> T:
        """What the reader makes of the JSON object that a request brings.

        A large one is read on another thread than the event loop's: lists of a million entries take seconds to check.
        ApiError if the server takes no requests, if the body is no object, and what the reader raises.
        """
        self.check_open()
        options = self.options
        body = await read_body(request.receive, request.headers, options.max_body_bytes, options.read_seconds)
        if len(body) <= LARGE_BODY:
            return reader(parse_object(body))
        return await self.unless_gone(self.decoder.prepared(lambda _: reader(parse_object(body))), request.receive)

    def cut_off(self) -> None:
        """Ends all requests under way with an error."""
        if not self._ending.done():
            self._ending.set_result(None)

    async def unless_gone(self, work: Coroutine[Any, Any, T], receive: Receive) -> T:
        """What the work returns or raises.  Cancels it and raises ClientGone if the caller hangs up first, or ApiError if the
        server is shutting down and can't wait any longer."""
        working, watching = asyncio.create_task(work), asyncio.create_task(_hung_up(receive))
        awaited: list[asyncio.Future[Any]] = [working, watching, self._ending]
        try:
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise ClientGone if watching.done() else cut_off()
        finally:
            for task in (working, watching):
                task.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    @property
    def _ending(self) -> asyncio.Future[None]:
        """Is set when requests are cut off.  Made when it is first asked for, because it belongs to the running event loop."""
        if self._cut_off is None:
            self._cut_off = asyncio.get_running_loop().create_future()
        return self._cut_off


async def _hung_up(receive: Receive) -> None:
    """Returns when the caller has closed the connection.  The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass
