"""Measures the stages between the start of the process and its first speculated tokens, and keeps imports short.

Keeps what runs now, too, for whoever tells users what they wait for.  It knows stage names and a clock.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

BEGAN = "SPECDEC_BEGAN"  # the variable in which scripts/in_venv.sh says when it became the command, after it had set up .venv


def process_age(of_process: float | None = None) -> float:
    """Seconds since this process began, or since it became this command, if a script says so.

    of_process: seconds since it began.  None asks Linux' /proc; 0 on systems without it, where nothing says it.
    """
    try:
        began = os.environ[BEGAN].replace(",", ".")  # bash writes numbers as the user's language does
        since_set_up = time.time() - float(began)
    except (KeyError, ValueError):
        since_set_up = float("inf")
    alive = _seconds_of_process() if of_process is None else of_process
    return min(alive, max(since_set_up, 0.0))  # a process that the command has started is younger


def _seconds_of_process() -> float:
    try:
        with open("/proc/self/stat") as file:
            began_ticks = float(file.read().rpartition(")")[2].split()[19])
        with open("/proc/uptime") as file:
            return float(file.read().split()[0]) - began_ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


@contextmanager
def without_collections() -> Iterator[None]:
    """Inside, Python's collector is off.  What imports make stays, and the collector would look through it many times.

    At the end all objects count as old.  Otherwise the next collection would look through all that was made inside.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if not gc.get_freeze_count():  # somebody else's frozen objects stay frozen
                gc.freeze()
                gc.unfreeze()
            gc.enable()


class Startup:
    """The seconds that each stage of the start took, in the order in which the stages ended.

    Only the first run of a stage counts, because a later one is no part of the start.
    """

    def __init__(self) -> None:
        self.stages: dict[str, float] = {}
        self._doing, self._done, self._parts = "importing", 0, 1
        self._last = time.perf_counter() - process_age()

    def lap(self, stage: str) -> None:
        """Ends a stage: the time since the last stage's end, or since the process began, belongs to it."""
        if stage not in self.stages:
            now = time.perf_counter()
            self.stages[stage], self._last = now - self._last, now

    def begin(self, doing: str, parts: int = 1) -> None:
        """Says what runs from now on, in words, and of how many parts it is."""
        self._doing, self._done, self._parts = doing, 0, parts

    def end(self) -> None:
        """The first tokens came: nobody waits for a start any more."""
        self._doing = ""

    def part_done(self) -> None:
        self._done += 1

    @property
    def doing(self) -> tuple[str, int, int]:
        """What runs now, how many of its parts are done, and how many there are; empty after the start."""
        return self._doing, min(self._done, self._parts), self._parts

    def report(self) -> str:
        """One line: the sum, then the seconds of each stage."""
        parts = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in self.stages.items())
        return f"{sum(self.stages.values()):.1f} s from the start of the process: {parts}"


STARTUP = Startup()  # the stages of this process; every module adds to this one object
