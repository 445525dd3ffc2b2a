"""What steps emit, or measure, while it is on its way from the device: see `steps.Pending`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from specdec.batch.emitted import read_logprobs
from specdec.runner.readback import Readback
from specdec.steps import Emitted


class EmittedPending:
    """What a chunk or a round emits.

    numbers: what tokens are read from, by `read`.  logprobs: rows of `token_logprobs`; None: there are none.
    ended: see Pending.  begun: the event from before a timed round.
    """

    def __init__(
        self,
        readback: Readback,
        numbers: Tensor,
        read: Callable[[Tensor], list[Emitted]],
        logprobs: Tensor | None,
        ended: Sequence[int] = (),
        begun: Any = None,
    ) -> None:
        self._read, self.ended = read, ended
        self._logprobs = None if logprobs is None else readback.start(logprobs)
        self._numbers = readback.start(numbers, begun)
        self.done = self._numbers.done  # the event after the step

    def read(self) -> list[Emitted]:
        emitted = self._numbers.read(self._read)
        if self._logprobs is None:
            return emitted
        return [row._replace(logprobs=each) for row, each in zip(emitted, self._logprobs.read(read_logprobs), strict=True)]

    def drop(self) -> None:
        self._numbers.drop()
        if self._logprobs is not None:
            self._logprobs.drop()

    def seconds(self) -> float:
        return self._numbers.seconds()


class BothPending:
    """What a round and then a chunk emit."""

    def __init__(self, around: EmittedPending, beside: EmittedPending) -> None:
        self._both, self.ended = (around, beside), around.ended

    def read(self) -> list[Emitted]:
        return [row for each in self._both for row in each.read()]

    def drop(self) -> None:
        for each in self._both:
            each.drop()

    def seconds(self) -> float:
        raise AssertionError("a pass of both is never timed")


class TryPending:
    """What a step that was tried took, between two events."""

    ended: Sequence[int] = ()

    def __init__(self, readback: Readback, begun: Any, done: Any) -> None:
        self._readback, self._begun, self._done = readback, begun, done

    def read(self) -> list[Emitted]:
        self._readback.wait(self._done)
        return []

    def drop(self) -> None:
        """Nothing is kept for it."""

    def seconds(self) -> float:
        return self._readback.seconds(self._begun, self._done)
