"""Says on stderr how far a long call is: a bar on a terminal, and elsewhere (logs, CI, pipes) a plain line now and then.

Plain lines come from a thread, so that a call that tells nothing for minutes has them too.  A call that ends soon has none.
This module knows nothing of what the call does.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, TextIO

State = tuple[str, int, int]  # what runs now, how many of its parts are done, how many there are
Progress = Callable[[str, int, int], None]  # takes a state


class Pace(NamedTuple):
    """When plain lines are printed, in seconds.

    quiet: how long a command may start without a line.  tick: between two looks at what its start does.  first: before a
    call's first line.  least, most: between two lines, which are as far apart as the call has taken, within these.  wait: the
    shortest sleep of the thread.
    """

    quiet: float = 5.0
    tick: float = 0.2
    first: float = 5.0
    least: float = 10.0
    most: float = 60.0
    wait: float = 0.1


PACE = Pace()


@contextmanager
def show_progress(name: str, parts: str, stream: TextIO | None = None, pace: Pace = PACE) -> Iterator[Progress]:
    """Gives the function to call with the present state.

    name: of the call, and what its parts are called, for plain lines.  stream: stderr if None.
    """
    stream = sys.stderr if stream is None else stream
    if stream is None or stream.closed:  # a program without a console has none
        yield lambda what, done, of: None
        return
    if not stream.isatty():
        with PlainLines(name, parts, stream, pace=pace).kept_up() as lines:
            yield lines
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    to_terminal = sys.stdout is not None and sys.stdout.isatty()  # else what is printed belongs where stdout goes
    with Bar(*columns, console=Console(file=stream), transient=True, redirect_stdout=to_terminal) as bar:
        task = bar.add_task(name)
        yield lambda what, done, of: bar.update(task, description=what, completed=done, total=of)


class PlainLines:
    """Prints what runs now: first after `pace.first` seconds, then ever more rarely.

    ended: nothing is printed once it is set.
    """

    def __init__(
        self,
        name: str,
        parts: str,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
        pace: Pace = PACE,
        ended: threading.Event | None = None,
    ) -> None:
        self._name, self._parts, self._stream, self._clock, self._pace = name, parts, stream, clock, pace
        self._start, self._due = clock(), pace.first
        self._what, self._done, self._of = "", 0, 1
        self._begun = (self._start, 0)  # when the present work was first told of, and how much of it was done then
        self._lock, self._ended = threading.Lock(), ended or threading.Event()

    def __call__(self, what: str, done: int, of: int) -> None:
        with self._lock:
            if (what, of) != (self._what, self._of):
                self._begun = (self._clock(), done)
            self._what, self._done, self._of = what, done, of
        self.print_if_due()

    def print_if_due(self) -> float:
        """Prints a line if it is time to and anything was told.  Returns the seconds until this is to be asked again."""
        with self._lock:
            now = self._clock()
            elapsed = now - self._start
            if self._what and elapsed >= self._due and not self._ended.is_set():
                self._due = elapsed + min(self._pace.most, max(self._pace.least, elapsed))
                print(self._line(now), file=self._stream, flush=True)
            return max(self._pace.wait, self._due - elapsed)

    @contextmanager
    def kept_up(self, ask: Callable[[], State] | None = None) -> Iterator[PlainLines]:
        """Prints lines that are due in a thread, too, as long as the context lasts.

        ask: gives the present state, where nobody tells it, until nothing runs; first after `pace.quiet` seconds.
        """
        thread = threading.Thread(target=self._keep_up, args=(ask,), name="specdec-progress", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._ended.set()
            thread.join(timeout=1.0)  # a log that nobody reads may hold it

    def _keep_up(self, ask: Callable[[], State] | None) -> None:
        with suppress(OSError, ValueError):  # the stream was closed, or its disk is full: the call goes on without lines
            if ask is None:
                while not self._ended.wait(self.print_if_due()):
                    pass
            elif not self._ended.wait(self._pace.quiet) and not self._stream.closed:
                while not self._ended.wait(self._pace.tick) and (state := ask())[0]:
                    self(*state)

    def _line(self, now: float) -> str:
        """The state after `now - start` seconds, and how long the present work will go on, if that is a minute or more."""
        said = [f"{now - self._start:.0f} s"]
        if self._of > 1:
            said.append(f"{self._done:,} of {self._of:,} {self._parts} done")
        since, before = self._begun
        if self._done > before and (left := (now - since) / (self._done - before) * (self._of - self._done)) >= 60:
            said.append(f"about {left / 60:.0f} min left")
        return f"specdec: {self._name}: {self._what} ({', '.join(said)})"
