"""What one request has written, on its way from the engine's thread to whoever asked for it.

The engine's thread puts and the caller takes.  Neither waits for the other: what a caller has not taken yet is joined to what
comes next, so an output queue never holds more than its request's own output.  This module knows no thread and no event loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from specdec.engine.request import Request
from specdec.engine.totals import Totals
from specdec.generation import Chunk


class OutputQueue:
    """The news of one request.

    wake: called by the engine's thread when there is news: each time for a stream, else only at the end.  It must not wait.
    submitted: when the request arrived, on the clock that `collect` is given.
    is_done: whether the request has ended; its result can be asked for then.
    """

    def __init__(self, request: Request, wake: Callable[[], None], submitted: float) -> None:
        self.request, self.wake = request, wake
        self.is_done = False
        self._submitted, self._last, self._seen = submitted, submitted, 0
        self._chunks: deque[Chunk] = deque()

    def entered(self, now: float, totals: Totals) -> None:
        """The request has got its first row and pages: the time that it waited is counted.  now, totals: see `collect`."""
        totals.queue.add(now - self._submitted)

    def collect(self, now: float, totals: Totals) -> None:
        """Puts what the request has written since the last call, and whether it has ended.  Between two steps, by their thread.

        now: the present time in seconds.  totals: gets the times of tokens and of requests that have ended.
        """
        self._count(now, totals)
        has_news = self.request.is_done
        if has_news:
            totals.request.add(now - self._submitted)
        if self.request.streaming:
            chunk = self.request.next_chunk()
            of_prompt_alone = self.request.output.finish_reason is not None and chunk.prompt_logprobs is not None
            if chunk.token_ids or chunk.text or of_prompt_alone:
                self._chunks.append(chunk)
                has_news = True
        self.is_done = self.request.is_done  # after the last chunk was put: whoever sees it finds that chunk
        if has_news:
            self.wake()

    def take(self) -> Chunk | None:
        """All news since the last call as one chunk; None: there is none.  For the caller's thread."""
        chunks = [self._chunks.popleft() for _ in range(len(self._chunks))]
        return joined(chunks) if chunks else None

    def _count(self, now: float, totals: Totals) -> None:
        """Counts the times of tokens that are new."""
        seen = len(self.request.output.token_ids)
        new, seconds = seen - self._seen, now - self._last
        if not new:
            return
        if not self._seen:
            totals.first_token.add(seconds)
        else:
            totals.between_tokens.add(seconds / new, new)
        self._last, self._seen = now, seen


def joined(chunks: Sequence[Chunk]) -> Chunk:
    """Consecutive chunks of one request as one."""
    logprobs = [each for chunk in chunks for each in chunk.logprobs or ()]
    ids = [token for chunk in chunks for token in chunk.token_ids]
    origins = [origin for chunk in chunks for origin in chunk.origins]
    sources = [source for chunk in chunks for source in chunk.sources]
    rounds = None if chunks[0].rounds is None else [each for chunk in chunks for each in chunk.rounds or ()]
    text = "".join(chunk.text for chunk in chunks)
    own = None if chunks[0].logprobs is None else logprobs
    return Chunk(text, ids, origins, own, sources, rounds, chunks[0].prompt_logprobs)
