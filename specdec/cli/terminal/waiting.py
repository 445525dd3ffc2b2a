"""Says on stderr what a command waits for before its first output, in a plain line now and then, if it waits for long.

What runs is kept by `specdec.startup`, as imports and loading tell it.  A quick start costs one thread that never wakes, and
prints nothing.  Nothing here runs where Python loads a decoder.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

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
    # A bar would fight with the hub's own.
    with PlainLines(name, PARTS, sys.stderr, pace=pace, ended=_over).kept_up(lambda: STARTUP.doing):
        yield


def over() -> None:
    """The wait is over: to be called before a command's own first output, unless that is the first tokens, which are seen
    without a call.  Does nothing the second time.
    """
    _over.set()
