"""Copies tokens from the device to the host: the copy is enqueued after the round that made them, and read when it is needed.

On a GPU the copy goes to pinned memory, and nobody waits for it until `read`; elsewhere it is a plain copy.  This module knows
tensors only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from specdec.parallel.processes import OtherRanks

R = TypeVar("R")


class Readback:
    """Copies small tensors to the host.  waits, wait_seconds: how often and how long the host waited for the device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waits = 0
        self.wait_seconds = 0.0
        self.other_ranks: OtherRanks | None = None  # if one fails, what was waited for means nothing
        self._spare: list[Tensor] = []  # allocating pinned memory is slow, so it is kept for later copies

    def start(self, source: Tensor, begun: Any = None) -> HostCopy:
        """Enqueues the copy.

        begun: an event (`record_event`) from before the work that made the tensor; needed only for `HostCopy.seconds`.
        """
        if self.device.type != "cuda":
            return HostCopy(self, source.clone(), begun, time.perf_counter())
        size = source.numel()
        pinned = next((spare for spare in self._spare if spare.numel() >= size and spare.dtype == source.dtype), None)
        if pinned is None:
            pinned = torch.empty(max(1024, size), dtype=source.dtype, pin_memory=True, device="cpu")
        else:
            self._spare = [spare for spare in self._spare if spare is not pinned]
        view = pinned[:size].view(source.shape)
        view.copy_(source, non_blocking=True)
        return HostCopy(self, view, begun, self.record_event(), pinned)

    def wait(self, event: Any) -> None:
        """Waits until the device has passed the event."""
        if self.device.type == "cuda":
            event.synchronize()

    def seconds(self, begun: Any, done: Any) -> float:
        """Seconds between two events that the device has passed."""
        return begun.elapsed_time(done) / 1e3 if self.device.type == "cuda" else done - begun

    def record_event(self) -> Any:
        """The present point in the device's time: a recorded CUDA event on a GPU, seconds elsewhere."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class HostCopy:
    """One copy that is under way.  done: the event after it."""

    def __init__(self, readback: Readback, host: Tensor, begun: Any, done: Any, pinned: Tensor | None = None) -> None:
        self._readback, self._host, self._begun, self.done, self._pinned = readback, host, begun, done, pinned

    def read(self, of: Callable[[Tensor], R]) -> R:
        """What `of` makes of the tensor's values, once they are there.  To be called once only."""
        try:
            if not self.is_there:
                start = time.perf_counter()
                self.done.synchronize()
                self._readback.wait_seconds += time.perf_counter() - start
                self._readback.waits += 1
        except RuntimeError as error:  # the device has failed, perhaps because another rank has
            if self._readback.other_ranks is not None:
                raise self._readback.other_ranks.explain(error) from error
            raise
        if self._readback.other_ranks is not None:
            self._readback.other_ranks.check()
        values = of(self._host)
        self.drop()
        return values

    @property
    def device_waits(self) -> bool:
        """Whether the device has made the values, and may wait for whoever reads them.  Where the device is the host: never."""
        return self._pinned is not None and self.is_there

    @property
    def is_there(self) -> bool:
        """Whether `read` would not wait."""
        return self._pinned is None or bool(self.done.query())

    def drop(self) -> None:
        """Gives the pinned memory back.  The next copy into it is enqueued later on the same stream, so copies can't mix."""
        if self._pinned is not None:
            self._readback._spare.append(self._pinned)

    def seconds(self) -> float:
        """Device seconds from `begun` to the end of the copy.  To be called only after `read`."""
        assert self._begun is not None
        return self._readback.seconds(self._begun, self.done)
