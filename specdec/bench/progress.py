"""Says on stderr how far a benchmark is: a bar on a terminal, and elsewhere (logs, CI, pipes) a plain line now and then.

Knows nothing of what is measured.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

LEAST_SECONDS = 10.0  # between two plain lines
Progress = Callable[[str, int, int], None]  # what runs now, passes done, passes in all


@contextmanager
def show_progress(stream: TextIO | None = None) -> Iterator[Progress]:
    """Gives the function to hand to `run_bench`.  stream: stderr if None."""
    stream = sys.stderr if stream is None else stream
    if not stream.isatty():
        yield PlainLines(stream)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task("loading")
        yield lambda what, done, of: bar.update(task, description=what, completed=done, total=of)


class PlainLines:
    """Prints what runs now when it begins, the first time at once, and then at most every LEAST_SECONDS."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._start = clock()
        self._printed: float | None = None

    def __call__(self, what: str, done: int, of: int) -> None:
        now = self._clock()
        if self._printed is not None and now - self._printed < LEAST_SECONDS:
            return
        self._printed = now
        passes = f", {done} of {of} passes done" if of > 1 else ""
        print(f"specdec: bench: {what} ({now - self._start:.0f} s{passes})", file=self._stream, flush=True)
