"""What steps emit, or measure, while it is on its way from the device: see `generation.Pending`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from specdec.batch.emitted import read_logprobs, read_scores, read_trees
from specdec.generation import Emitted
from specdec.runner.readback import Readback


class EmittedPending:
    """What a chunk or a round emits.

    numbers: what tokens are read from, by `read`.  logprobs: rows of `token_logprobs`; trees: of `tree_numbers`; None: there
    are none.  ended: see Pending.  begun: the event from before a timed round.  scores: of a chunk's tokens, with how many each
    part has (see `read_scores`).
    """

    def __init__(
        self,
        readback: Readback,
        numbers: Tensor,
        read: Callable[[Tensor], list[Emitted]],
        logprobs: Tensor | None,
        ended: Sequence[int] = (),
        begun: Any = None,
        trees: Tensor | None = None,
        scores: tuple[Tensor, Sequence[int]] | None = None,
    ) -> None:
        self._read, self.ended = read, ended
        besides: list[tuple[str, Tensor | None, Callable[[Tensor], list[Any]]]]
        besides = [("logprobs", logprobs, read_logprobs), ("tree", trees, read_trees)]
        if scores is not None:
            besides.append(("scores", scores[0], partial(read_scores, counts=scores[1])))
        self._besides = [(name, readback.start(given), of) for name, given, of in besides if given is not None]
        self._numbers = readback.start(numbers, begun)
        self.done = self._numbers.done  # the event after the step

    def read(self) -> list[Emitted]:
        emitted = self._numbers.read(self._read)
        for name, copy, of in self._besides:
            emitted = [row._replace(**{name: each}) for row, each in zip(emitted, copy.read(of), strict=True)]
        return emitted

    def drop(self) -> None:
        self._numbers.drop()
        for _, copy, _ in self._besides:
            copy.drop()

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
