"""Says on stderr how far a long call is: a bar on a terminal, and elsewhere (logs, CI, pipes) a plain line now and then.

Knows nothing of what the call does.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

LEAST_SECONDS = 10.0  # between two plain lines
Progress = Callable[[str, int, int], None]  # what runs now, how many of its parts are done, how many there are


@contextmanager
def show_progress(name: str, parts: str, stream: TextIO | None = None) -> Iterator[Progress]:
    """Gives the function to call with the present state.

    name: of the call, and what its parts are called, for plain lines.  stream: stderr if None.
    """
    stream = sys.stderr if stream is None else stream
    if stream is None or stream.closed:  # a program without a console has none
        yield lambda what, done, of: None
        return
    if not stream.isatty():
        yield PlainLines(name, parts, stream)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task(name)
        yield lambda what, done, of: bar.update(task, description=what, completed=done, total=of)


class PlainLines:
    """Prints what runs now when it begins, the first time at once, and then at most every LEAST_SECONDS."""

    def __init__(self, name: str, parts: str, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._name, self._parts, self._stream, self._clock = name, parts, stream, clock
        self._start = clock()
        self._printed: float | None = None

    def __call__(self, what: str, done: int, of: int) -> None:
        now = self._clock()
        if self._printed is not None and now - self._printed < LEAST_SECONDS:
            return
        self._printed = now
        parts = f", {done} of {of} {self._parts} done" if of > 1 else ""
        print(f"specdec: {self._name}: {what} ({now - self._start:.0f} s{parts})", file=self._stream, flush=True)
