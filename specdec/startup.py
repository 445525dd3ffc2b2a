"""Where the seconds go between the start of the process and its first speculated tokens.  Knows names and a clock only."""

from __future__ import annotations

import os
import time


def process_age() -> float:
    """Seconds since this process began; 0 where the system does not say."""
    try:
        with open("/proc/self/stat") as file:
            began_ticks = float(file.read().rpartition(")")[2].split()[19])
        with open("/proc/uptime") as file:
            return float(file.read().split()[0]) - began_ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return 0.0


class Startup:
    """Seconds of each stage, in order.  A stage counts once, the first time: what comes later is not the start."""

    def __init__(self) -> None:
        self.stages: dict[str, float] = {}
        self._last = time.perf_counter() - process_age()

    def lap(self, stage: str) -> None:
        """What was done since the last lap was this stage."""
        if stage not in self.stages:
            now = time.perf_counter()
            self.stages[stage], self._last = now - self._last, now

    def report(self) -> str:
        parts = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in self.stages.items())
        return f"{sum(self.stages.values()):.1f} s from the start of the process: {parts}"


STARTUP = Startup()  # of this process
