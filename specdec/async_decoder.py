"""AsyncSpecDecoder: a SpecDecoder for coroutines.  Any number of tasks may call one, and their requests share the batch.

The engine runs on its own thread, and prompts are turned into ids on others, so the event loop never waits for either.  This
module knows requests and event loops; it knows no model.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from specdec.chat.answer import ChatAnswer
from specdec.chat.form import AUTO
from specdec.chat.tools import read_rules
from specdec.config import SamplingParams, SpecConfig, names_settings
from specdec.decoder import SpecDecoder, check_one_prompt, new_chat, scoring
from specdec.draft.kind import Draft
from specdec.engine.engine_thread import EngineThread
from specdec.engine.output_queue import OutputQueue
from specdec.engine.request import Request
from specdec.engine.totals import Totals
from specdec.generation import Chunk, Generation, TokenLogprob
from specdec.options import EngineOptions, shows_options
from specdec.prompts.chat import ChatPrompt

T = TypeVar("T")

ENCODERS = 4  # threads that turn prompts into ids


class AsyncSpecDecoder:
    """The coroutines of a decoder.  `async with` closes the decoder at the end of the block.

    decoder: the SpecDecoder behind it, which other threads may call at the same time.
    """

    def __init__(self, decoder: SpecDecoder) -> None:
        if not isinstance(decoder, SpecDecoder):
            raise TypeError(
                f"decoder must be a SpecDecoder, got {decoder!r} of type {type(decoder).__name__}; nearest thing that works: "
                "AsyncSpecDecoder.from_pretrained"
            )
        self.decoder = decoder
        self._encoders = ThreadPoolExecutor(ENCODERS, thread_name_prefix="specdec prompts")
        end_threads = weakref.WeakMethod(self._end_threads)
        decoder.owner.at_close.append(lambda: (end := end_threads()) and end())
        self._notifier: LoopNotifier | None = None

    @classmethod
    @shows_options
    def from_pretrained(
        cls,
        target: str | Path,
        draft: Draft = None,
        spec: SpecConfig | None = None,
        *,
        options: EngineOptions | None = None,
        **settings: Any,
    ) -> AsyncSpecDecoder:
        """Loads a pair as `SpecDecoder.from_pretrained` does, with the same options and errors.

        The models are loaded when it returns.  In a program whose event loop must not wait for that, call it through
        `asyncio.to_thread`.
        """
        return cls(SpecDecoder.from_pretrained(target, draft, spec, options=options, **settings))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a decoder can't be copied or pickled; nearest thing that works: any number of tasks may share one")

    async def __aenter__(self) -> AsyncSpecDecoder:
        self.decoder.owner.check_open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the decoder: see `SpecDecoder.close`."""
        await asyncio.to_thread(self.decoder.close)

    def _end_threads(self) -> None:
        self._encoders.shutdown(wait=False)

    @property
    def totals(self) -> Totals:
        """What the engine has done since its start and what it holds now."""
        return self.decoder.engine.totals()

    @property
    def failure(self) -> BaseException | None:
        """What broke the engine for good; None while it works."""
        return self.decoder.owner.failure

    @names_settings
    async def generate(
        self,
        prompt: Any,
        sampling: SamplingParams | None = None,
        *,
        speculate: bool = True,
        trees: bool = False,
        cache_salt: str | None = None,
    ) -> Generation:
        """Generates for one prompt; for several, gather several calls.  A task that is cancelled ends its request.

        prompt: a string, a list of token ids, or chat messages.  sampling: None: SamplingParams().  speculate, trees,
        cache_salt: see `SpecDecoder.generate`.

        ValueError and TypeError name what can't be used, and RuntimeError is raised if the request fails while it runs.
        """
        how: dict[str, Any] = {"speculate": speculate, "trees": trees, "cache_salt": cache_salt}
        return await self.run(await self.new_request(prompt, sampling, **how))

    @names_settings
    async def chat(
        self,
        messages: Sequence[Any],
        sampling: SamplingParams | None = None,
        *,
        tools: Sequence[Any] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tool_parser: str = AUTO,
        reasoning_parser: str = AUTO,
        speculate: bool = True,
        cache_salt: str | None = None,
    ) -> ChatAnswer:
        """Answers a chat: see `SpecDecoder.chat`, which takes the same.  A task that is cancelled ends its request."""
        rules = read_rules(tools, tool_choice, parallel_tool_calls)
        prompt = ChatPrompt(messages, rules.for_template, chat_template_kwargs or {})
        how: dict[str, Any] = {"speculate": speculate, "cache_salt": cache_salt}
        request, answer_of = await self.prepared(
            lambda decoder: new_chat(decoder, prompt, sampling, rules, tool_parser, reasoning_parser, **how)
        )
        return answer_of(await self.run(request))

    async def score(self, prompt: Any, top: int = 0) -> list[TokenLogprob | None]:
        """How likely each token of one prompt is: see `SpecDecoder.score`.  For several prompts, gather several calls."""
        return (await self.generate(prompt, scoring(top), speculate=False)).prompt_logprobs or []

    @names_settings
    def stream(
        self,
        prompt: Any,
        sampling: SamplingParams | None = None,
        *,
        speculate: bool = True,
        trees: bool = False,
        cache_salt: str | None = None,
    ) -> AsyncStream:
        """Generates for one prompt, and gives its chunks to an `async for`; leaving the loop ends the request.

        prompt, sampling, speculate, trees, cache_salt, errors: see `generate`; errors are raised by the first step of the loop.
        """
        how: dict[str, Any] = {"speculate": speculate, "trees": trees, "cache_salt": cache_salt, "streaming": True}
        return AsyncStream(self, lambda: self.new_request(prompt, sampling, **how))

    async def new_request(
        self,
        prompt: Any,
        sampling: SamplingParams | None = None,
        *,
        name: str = "prompt",
        speculate: bool = True,
        trees: bool = False,
        streaming: bool = False,
        cache_salt: str | None = None,
    ) -> Request:
        """A checked request for `run`, or with `streaming` for `chunks`.  name: what errors call the prompt."""
        check_one_prompt(prompt, "asyncio.gather of a call for each")
        params = SamplingParams() if sampling is None else sampling

        def made(decoder: SpecDecoder) -> Request:
            ids = decoder.encode(prompt, name)
            how: dict[str, Any] = {"streaming": streaming, "speculate": speculate, "trees": trees, "cache_salt": cache_salt}
            return decoder.new_request(ids, params, name, **how)

        return await self.prepared(made)

    async def prepared(self, work: Callable[[SpecDecoder], T]) -> T:
        """work(decoder), on one of the threads that turn prompts into ids."""
        self.decoder.owner.check_open()  # before the threads are asked, which end with the decoder
        return await asyncio.get_running_loop().run_in_executor(self._encoders, work, self.decoder)

    async def run(self, request: Request) -> Generation:
        """Runs a request to its end.  ValueError if it has run before, RuntimeError if it fails."""
        news = asyncio.Event()
        queue = self.submit(request, news)  # if it is refused, it may be somebody else's, and is not cancelled
        try:
            while not queue.is_done:  # news of a request that streams are chunks, too, which nobody takes here
                await news.wait()
                news.clear()
        finally:
            self.decoder.owner.cancel(request)
        return request.result()

    def chunks(self, request: Request) -> AsyncStream:
        """The chunks of a request that was made with `streaming`.  It is submitted by the first step of the loop."""

        async def made() -> Request:
            if isinstance(request, Request) and not request.streaming:
                raise ValueError("chunks needs a request that was made with streaming=True; nearest thing that works: run")
            return request

        return AsyncStream(self, made)

    def submit(self, request: Request, news: asyncio.Event) -> OutputQueue:
        """Hands a request to the engine.  news: is set in the running event loop when the queue has something."""
        loop = asyncio.get_running_loop()
        if self._notifier is None or self._notifier.loop is not loop:
            self._notifier = LoopNotifier(loop)
        notifier = self._notifier
        (queue,) = self.decoder.owner.submit([request], lambda: notifier.notify(news))
        return queue


class AsyncStream:
    """The chunks of one request.  A reader that is slow gets several rounds in one chunk.

    Whoever drops the stream or calls `aclose` before its end ends the request and frees its row and pages.
    """

    def __init__(self, decoder: AsyncSpecDecoder, make: Callable[[], Awaitable[Request]]) -> None:
        self._decoder, self._make = decoder, make
        self._engine_thread: EngineThread = decoder.decoder.owner
        self._news = asyncio.Event()
        self._queue: OutputQueue | None = None
        self._is_closed = self._is_read = False

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Chunk:
        """The next chunk; waits for it.  RuntimeError if the request has failed."""
        if self._is_read:
            raise RuntimeError(
                "another task waits for this stream's next chunk; nearest thing that works: a stream for each task"
            )
        self._is_read = True
        try:
            if (chunk := await self._next()) is None:
                raise StopAsyncIteration
            return chunk
        finally:
            self._is_read = False

    async def _next(self) -> Chunk | None:
        """The next chunk; None at the end, and as soon as the stream is closed, which another task may do meanwhile."""
        if self._queue is None and not self._is_closed:
            request = await self._make()
            if not self._is_closed:
                self._queue = self._decoder.submit(request, self._news)
        while self._queue is not None and not self._is_closed:
            self._news.clear()
            is_done = self._queue.is_done  # asked before taking: whatever came before the end is taken now
            if chunk := self._queue.take():
                return chunk
            if is_done:
                self._queue.request.result()
                break
            await self._news.wait()
        return None

    async def aclose(self) -> None:
        """Ends the request."""
        self._close()

    def result(self) -> Generation:
        """The finished generation, after the last chunk.  RuntimeError if the request failed or has not ended."""
        if self._queue is None or not self._queue.is_done or self._queue.request.cancelled:
            raise RuntimeError("the stream has not come to its end; nearest thing that works: read it to the end first")
        return self._queue.request.result()

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        self._is_closed = True
        if self._queue is not None:
            self._engine_thread.cancel(self._queue.request)


class LoopNotifier:
    """Sets events of an event loop from another thread, as many as come up in one go with a single call into the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._events: deque[asyncio.Event] = deque()
        self._is_scheduled = False

    def notify(self, event: asyncio.Event) -> None:
        """For the engine's thread.  RuntimeError if the event loop is closed."""
        self._events.append(event)
        if not self._is_scheduled:
            self._is_scheduled = True  # before the call, since the loop may run it at once
            try:
                self.loop.call_soon_threadsafe(self._set_events)
            except RuntimeError:
                self._is_scheduled = False
                raise

    def _set_events(self) -> None:
        self._is_scheduled = False  # before the events are taken: one that comes now schedules another call
        while self._events:
            self._events.popleft().set()
