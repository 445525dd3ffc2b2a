"""Measures the seconds and calls of each phase, when that is asked for.

On a GPU the clock waits until every phase has ended, so measuring makes rounds slower.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from specdec.ops.compiling.rehearsal import is_rehearsed


class PhaseClock:
    """enabled: whether to measure.  seconds, calls: sums by the phase's name since the last `clear`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.enabled = False
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()

    def clear(self) -> None:
        """Sets all sums to zero."""
        self.seconds.clear()
        self.calls.clear()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the time of the block to the phase's sum; does nothing while the clock is not enabled, or in a rehearsal."""
        if not self.enabled or is_rehearsed():
            yield
            return
        self._wait()
        start = time.perf_counter()
        yield
        self._wait()
        self.seconds[name] += time.perf_counter() - start
        self.calls[name] += 1

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
