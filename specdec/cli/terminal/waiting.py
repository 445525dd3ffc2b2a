"""Says on stderr what a command waits for before its first output, in a plain line now and then, if it waits for long.

What runs is kept by `specdec.startup`, as imports and loading tell it.  A quick start costs one thread that never wakes, and
prints nothing.  Nothing here runs where Python loads a decoder.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from specdec.screen.progress import PACE, Pace, PlainLines
from specdec.startup import STARTUP

PARTS = "tensors"  # what the parts of a stage are, where it has some

_over = threading.Event()  # of the command that this process runs


@contextmanager
def told_if_slow(name: str, pace: Pace = PACE) -> Iterator[None]:
    """Inside, a command waits until it calls `over`.  name: of the command."""
    global _over
    _over = threading.Event()
    STARTUP.begin("importing")
    watch = threading.Thread(target=_tell, args=(name, _over, pace), name="specdec-waiting", daemon=True)
    watch.start()
    try:
        yield
    finally:
        over()
        watch.join(1.0)  # it may wait for whoever reads stderr


def over() -> None:
    """The wait is over: to be called before a command's own first output, unless that is the first tokens, which are seen
    without a call.  Does nothing the second time.
    """
    _over.set()


def _tell(name: str, ended: threading.Event, pace: Pace) -> None:
    show = PlainLines(name, PARTS, sys.stderr, pace=pace)  # counts seconds from here; a bar would fight with the hub's own
    with suppress(OSError, ValueError):  # stderr was closed, or its disk is full
        if ended.wait(pace.quiet) or sys.stderr.closed:
            return
        while not ended.wait(pace.tick) and STARTUP.doing[0]:
            show(*STARTUP.doing)
