"""What a process writes to stdout and stderr, without waiting for whoever reads it.

A pipe that nobody reads takes 64 KiB; after that every write waits, and so does whoever holds what the writer holds.  A
`NonBlockingStream` stands in for `sys.stderr` or `sys.stdout`: lines go through a queue of bounded length to a thread, which
alone waits.  Warnings, tracebacks, `print` and loggers come this way too.  What C code writes by itself does not.

Knows neither HTTP nor what is written.
"""

from __future__ import annotations

import io
import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from queue import SimpleQueue
from typing import Any, TypeAlias

MAX_HELD = 4 << 20  # characters
MAX_PIECE_LENGTH = 1 << 16  # of a line that has not ended
CLOSING_SECONDS = 2.0


Queue: TypeAlias = "SimpleQueue[tuple[int, str] | None]"  # (lost lines of which to speak first, text); None: the end


class NonBlockingStream(io.TextIOBase):
    """A text stream over a descriptor, on which no call waits for the reader.  For any thread, and for handlers of signals.

    A write that does not end its line is held until the same thread ends the line or calls `flush`, so lines stay whole.

    max_held: characters that wait for the reader.  write: as os.write.  closing_seconds: for the reader to take what waits
    when the stream is closed.  queue: what lines wait in.

    dropped: how many lines were lost, because the queue was full or the descriptor took nothing (a full disk, a reader that
    is gone).  A line of JSON says so as soon as the descriptor takes text again.
    """

    def __init__(
        self,
        descriptor: int,
        max_held: int = MAX_HELD,
        write: Callable[[int, bytes], int] = os.write,
        closing_seconds: float = CLOSING_SECONDS,
        queue: Queue | None = None,
    ) -> None:
        self.dropped = 0
        self._descriptor, self._max_held, self._write_some = descriptor, max_held, write
        self._closing_seconds = closing_seconds
        self._lock = threading.RLock()  # a signal's handler may write while its thread writes
        self._begun = threading.local()
        self._queue: Queue = SimpleQueue() if queue is None else queue
        self._held = 0  # characters in the queue or with the thread
        self._unsaid = 0  # lost lines of which nothing has been written
        self._is_closed = False
        self._is_torn = False  # whether the descriptor took only the beginning of a text
        self._thread = threading.Thread(target=self._run, name="specdec output", daemon=True)
        self._thread.start()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def write(self, text: str) -> int:
        ended, newline, begun = (self._piece + text).rpartition("\n")
        self._begun.text = begun
        if newline:
            self._put(ended + newline)
        if len(begun) > MAX_PIECE_LENGTH:
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Hands on what this thread has begun.  Waits for nothing."""
        if piece := self._piece:
            self._begun.text = ""
            self._put(piece)

    def drain(self, seconds: float) -> None:
        """Waits until everything has been written, but no longer than that.  Takes no lock, for handlers of signals."""
        deadline = time.monotonic() + seconds
        while self._held and time.monotonic() < deadline:
            time.sleep(0.005)

    def close(self) -> None:
        """Writes what can be written within `closing_seconds`, and ends the thread unless the reader holds it up."""
        if not self._is_closed:
            self.flush()
            deadline = time.monotonic() + self._closing_seconds
            self.drain(self._closing_seconds)
            self._is_closed = True
            self._queue.put(None)
            self._thread.join(max(0.0, deadline - time.monotonic()))

    @property
    def closed(self) -> bool:
        return self._is_closed

    @property
    def _piece(self) -> str:
        """What this thread has written of a line that has not ended."""
        return getattr(self._begun, "text", "")

    def _put(self, text: str) -> None:
        with self._lock:
            # After a loss half of the queue must be free, or a slow reader would get a note about losses with every line.
            room = self._max_held // (2 if self._unsaid else 1)
            if self._is_closed or (self._held and self._held + len(text) > room):
                self._lose(text)
                return
            lost, self._unsaid = self._unsaid, 0
            self._held += len(text)
            self._queue.put((lost, text))

    def _lose(self, text: str) -> None:
        lines = text.count("\n") or bool(text)
        self.dropped += lines
        self._unsaid += lines

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            lost, text = item
            is_written = self._write((note(lost) if lost else "") + text)
            with self._lock:
                if not is_written:
                    self._unsaid += lost
                    self._lose(text)
                last, is_last = self._unsaid, self._held == len(text)
                if is_written and is_last and last:  # nothing may follow for long
                    self._queue.put((last, ""))
                    self._unsaid = 0
                self._held -= len(text)

    def _write(self, text: str) -> bool:
        """Whether the descriptor took all of it."""
        whole = left = (("\n" if self._is_torn else "") + text).encode("utf-8", "backslashreplace")
        while left:
            try:
                left = left[self._write_some(self._descriptor, left) :]
            except BlockingIOError:  # whoever shares the pipe has made it one that does not wait
                room = select.poll()
                room.register(self._descriptor, select.POLLOUT)
                room.poll()
            except OSError:
                break
        self._is_torn = bool(left) and (self._is_torn or len(left) < len(whole))
        return not left


def note(lines: int) -> str:
    """The line about lines that were lost."""
    message = f"{lines} lines were dropped here, because nobody read them or the disk was full"
    return json_line("server", {"level": "warning", "message": message})


def json_line(event: str, fields: dict[str, Any]) -> str:
    """A line of the log."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": now, "event": event, **fields}) + "\n"


def lines_dropped() -> int:
    """How many lines to stderr were lost."""
    return sys.stderr.dropped if isinstance(sys.stderr, NonBlockingStream) else 0


@contextmanager
def output_that_never_waits() -> Iterator[None]:
    """Inside, `sys.stderr` and `sys.stdout` are such streams, if they have descriptors.  At the end what can be is written."""
    with ExitStack() as held:
        for name in ("stderr", "stdout"):
            stream: Any = getattr(sys, name)
            try:
                stream.flush()
                replacement = NonBlockingStream(stream.fileno())
            except (OSError, ValueError, AttributeError):  # text in memory, which nothing holds up
                continue
            held.callback(setattr, sys, name, stream)
            held.callback(replacement.close)
            setattr(sys, name, replacement)
        yield
