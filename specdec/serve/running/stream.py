"""Streamed answers: server-sent events, written as the engine gives out text.

A chunk is asked for only after the one before has been written, so a slow reader gets fewer, longer chunks, and nobody waits
for it.  The news of several choices that come together are written together.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager, aclosing
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specdec.async_decoder import AsyncStream
from specdec.engine.request import Request
from specdec.generation import Chunk, FinishReason, Generation
from specdec.serve.log import CLIENT_GONE, LogEntry
from specdec.serve.running.generate import failure_of
from specdec.serve.state import ServerState
from specdec.serve.wire.errors import ApiError, ClientGone
from specdec.serve.wire.requests import RequestPlan

News = list[tuple[int, Chunk | None]]  # choices, and what has come of each; None: it has ended
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies must not collect chunks
LAST_WORD_SECONDS = 1.0  # for an error to be written to a reader that may have stopped reading


class EventWriter(Protocol):
    """Writes the events of one stream."""

    def chunk(self, index: int, chunk: Chunk) -> bytes:
        """A piece of a choice."""
        ...

    def finish(self, index: int, reason: FinishReason) -> bytes:
        """The end of a choice."""
        ...

    def end(self, generations: Sequence[Generation]) -> bytes:
        """What follows the last choice's end."""
        ...

    def failed(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""
        ...


class EventStream(Response):
    """The response that streams the choices of a plan.

    writer: writes its events.  queued: held until the stream has been read to its end, and left then.  entry: the request's
    line in the log.
    """

    media_type = "text/event-stream"

    def __init__(
        self, state: ServerState, plan: RequestPlan, requests: Sequence[Request], writer: EventWriter,
        queued: AbstractContextManager[object], entry: LogEntry,
    ) -> None:  # fmt: skip
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._state, self._plan, self._entry, self._queued = state, plan, entry, queued
        self._streams = [state.decoder.chunks(request) for request in requests]
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._queued:
            try:
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                await self._state.unless_gone(self._write(send), receive)
            except ClientGone:
                self._entry.status = CLIENT_GONE
            except ApiError as error:
                self._entry.failed(error)
                await self._last_word(send, error)
            finally:
                for stream in self._streams:
                    await stream.aclose()

    async def _write(self, send: Send) -> None:
        """Writes all chunks, then the end.  ApiError if a choice fails while it runs."""
        news = _one(self._streams[0]) if len(self._streams) == 1 else _merged(self._streams)
        try:
            async with aclosing(news):
                async for chunks in news:
                    if events := b"".join(self._event(index, chunk) for index, chunk in chunks):
                        self._entry.first_text = self._entry.first_text or time.perf_counter()
                        await send({"type": "http.response.body", "body": events, "more_body": True})
            generations = [stream.result() for stream in self._streams]
        except RuntimeError as error:
            raise failure_of(self._state.decoder, error) from error
        self._entry.finished(self._plan, generations, self._state.options.log_prompts)
        await send({"type": "http.response.body", "body": self._writer.end(generations)})

    def _event(self, index: int, chunk: Chunk | None) -> bytes:
        """What is written of a choice's news; None: it has ended."""
        if chunk is None:
            return self._writer.finish(index, self._streams[index].result().finish_reason)
        return self._writer.chunk(index, chunk)

    async def _last_word(self, send: Send, error: ApiError) -> None:
        """Writes the error as the last event, unless the reader has stopped reading."""
        try:
            async with asyncio.timeout(LAST_WORD_SECONDS):
                await send({"type": "http.response.body", "body": self._writer.failed(error)})
        except TimeoutError:
            pass


async def _one(stream: AsyncStream) -> AsyncGenerator[News, None]:
    """The news of a single choice, without the tasks that several choices need."""
    async for chunk in stream:
        yield [(0, chunk)]
    yield [(0, None)]


async def _merged(streams: Sequence[AsyncStream]) -> AsyncGenerator[News, None]:
    """The news of several choices, those that have come by the time together."""
    waiting = {asyncio.create_task(_next(stream)): index for index, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            news = [(waiting.pop(task), task.result()) for task in done]
            yield news
            for index, chunk in news:
                if chunk is not None:
                    waiting[asyncio.create_task(_next(streams[index]))] = index
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _next(stream: AsyncStream) -> Chunk | None:
    """The next chunk; None at the end."""
    return await anext(stream, None)
