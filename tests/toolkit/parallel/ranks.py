"""Ranks in threads of one process: what several processes would compute, without starting any."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from queue import SimpleQueue
from threading import Barrier, BrokenBarrierError, Lock
from typing import Any, TypeVar

import torch
from torch import Tensor

from specdec.parallel.group import Group
from specdec.parallel.vocabulary import Vocabulary

Result = TypeVar("Result")
PATIENCE = 60.0  # seconds that a rank waits for the others: one of them has failed


class ThreadGroup(Group):
    """A rank that is a thread.

    shared: one tensor's place for each rank.  turn: held by the rank that runs, where only one may.
    """

    def __init__(self, rank: int, shared: list[Tensor | None], barrier: Barrier, turn: Any = None) -> None:
        self.rank, self.size = rank, len(shared)
        self._shared, self._barrier, self._turn = shared, barrier, turn
        self.exchanges = 0

    def all_gather(self, x: Tensor) -> Tensor:
        self.exchanges += 1
        self._shared[self.rank] = x
        self._wait()
        everything = torch.stack([one for one in self._shared if one is not None])
        self._wait()  # nobody may write before all have read
        return everything

    def _wait(self) -> None:
        if self._turn is None:
            self._barrier.wait(PATIENCE)
            return
        self._turn.release()
        try:
            self._barrier.wait(PATIENCE)
        finally:
            self._turn.acquire()


class Queues:
    """The other ranks, each as the queue that it takes its steps from."""

    def __init__(self, queues: Sequence[SimpleQueue[Any]]) -> None:
        self._queues = queues

    def send(self, message: Any) -> None:
        for queue in self._queues:
            queue.put(message)

    def check(self) -> None:
        pass

    def explain(self, error: BaseException) -> BaseException:
        return error


def on_ranks(size: int, work: Callable[[ThreadGroup], Result], in_turns: bool = False) -> list[Result]:
    """What `work` gives on each of `size` ranks.  An error of one rank ends the others' waiting.

    in_turns: a rank runs while the others wait in an exchange: Triton's interpreter serves one thread at a time.
    """
    turn = Lock() if in_turns else None
    shared: list[Tensor | None] = [None] * size
    barrier = Barrier(size)

    def one(rank: int) -> Result:
        try:
            with torch.inference_mode(), turn or nullcontext():
                return work(ThreadGroup(rank, shared, barrier, turn))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        done = [pool.submit(one, rank) for rank in range(size)]
        failed = [error for error in (each.exception() for each in done) if error is not None]
        if failed:
            raise min(failed, key=lambda error: isinstance(error, BrokenBarrierError))  # the others only waited for it
        return [each.result() for each in done]


def run_of(vocabulary: Vocabulary, logits_RV: Tensor) -> Tensor:
    """[R, W]: a rank's run of whole logits."""
    return logits_RV[:, vocabulary.first : vocabulary.first + vocabulary.own]
