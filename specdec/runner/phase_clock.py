"""Seconds and calls of each phase, if somebody asks.  On a GPU that means waiting for every phase, which costs time itself."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PhaseClock:
    """enabled: whether to measure; the rest adds up until it is cleared."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.enabled = False
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()

    def clear(self) -> None:
        self.seconds.clear()
        self.calls.clear()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if not self.enabled:
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
