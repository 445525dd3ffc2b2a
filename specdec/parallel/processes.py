"""Starts the other ranks of a model as processes of this machine, connects all of them, and passes messages to them.

The first rank lives in the caller's process.  Each other rank is a process of its own that runs a function until its messages
end.  Two connections hold them together: a `Group`, for exchanges of tensors, and a pipe from the first rank to each other one.
A rank that ends early closes both, which ends the waiting of the others with an error; if the first rank's process ends, the
pipes close and the others leave.  This module knows no model and no step.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch.distributed as dist

from specdec.parallel.group import Group, ProcessGroup

HOST = "127.0.0.1"
PATIENCE = timedelta(seconds=60)  # that ranks wait for each other when they connect
END_SECONDS = 10.0  # that a rank is given to leave by itself


class RankFailed(RuntimeError):
    """Another rank has ended with an error."""


class Seat(NamedTuple):
    """A rank's place.  port: where the store of the first rank listens."""

    rank: int
    size: int
    port: int

    def join(self) -> Group:
        """Connects to the other ranks, which do the same."""
        store = dist.TCPStore(HOST, self.port, self.size, is_master=False, timeout=PATIENCE, wait_for_workers=False)
        return ProcessGroup(dist.ProcessGroupGloo(store, self.rank, self.size, PATIENCE), self.rank, self.size)


# What another rank runs: it is given its place, the arguments, and the messages of the first rank until there are no more.
Work = Callable[[Seat, Any, Iterator[Any]], None]


class Followers:
    """The processes of all ranks but the first.

    work: what they run, a function of a module (it is pickled).  arguments: what it is given.
    """

    def __init__(self, size: int, work: Work, arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA forbids fork
        self._store = dist.TCPStore(HOST, 0, size, is_master=True, timeout=PATIENCE, wait_for_workers=False)
        self.seat = Seat(0, size, self._store.port)
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(1, size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_run, args=(work, Seat(rank, size, self.seat.port), arguments, theirs), name=f"rank {rank}", daemon=True
            )
            process.start()
            theirs.close()  # so that the pipe ends when the process does
            self._pipes.append(mine)
            self._processes.append(process)

    def join(self) -> Group:
        """The first rank's group, once all others have joined."""
        gloo = dist.ProcessGroupGloo(self._store, 0, self.seat.size, PATIENCE)
        return ProcessGroup(gloo, 0, self.seat.size)

    def send(self, message: Any) -> None:
        """Passes a message to every rank.  RankFailed, with its traceback, if one has ended."""
        self.check()
        for pipe in self._pipes:
            try:
                pipe.send(message)
            except OSError as error:
                self.check()
                raise RankFailed(f"a rank has ended: {error}") from error

    def wait(self) -> list[Any]:
        """The next answer of each rank.  RankFailed, with its traceback, if one has ended."""
        answers = []
        for rank, pipe in enumerate(self._pipes, 1):
            try:
                kind, answer = pipe.recv()
            except EOFError:
                raise RankFailed(f"rank {rank} has ended without a word") from None
            if kind == "failed":
                raise RankFailed(f"rank {rank} failed:\n{answer}")
            answers.append(answer)
        return answers

    def check(self) -> None:
        """RankFailed, with its traceback, if a rank has ended."""
        for rank, (pipe, process) in enumerate(zip(self._pipes, self._processes), 1):
            with contextlib.suppress(EOFError, OSError):
                if pipe.poll():
                    kind, answer = pipe.recv()
                    if kind == "failed":
                        raise RankFailed(f"rank {rank} failed:\n{answer}")
            if process.exitcode is not None:
                raise RankFailed(f"rank {rank} has ended with exit code {process.exitcode}")

    def close(self) -> None:
        """Ends the messages, and the processes that do not leave by themselves.  A second call does nothing."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(END_SECONDS)
            if process.exitcode is None:
                process.kill()
                process.join()


def _run(work: Work, seat: Seat, arguments: Any, pipe: Connection) -> None:
    """What the process of another rank does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the first rank's; it closes the pipe
    try:
        work(seat, arguments, _messages(pipe))
    except BaseException:
        with contextlib.suppress(OSError):  # the first rank may be gone
            pipe.send(("failed", traceback.format_exc()))
        raise SystemExit(1) from None


def _messages(pipe: Connection) -> Iterator[Any]:
    """The first rank's messages, until it closes the pipe or its process ends.  First tells it that this rank is ready."""
    with contextlib.suppress(OSError):
        pipe.send(("ready", None))
    with contextlib.suppress(EOFError, OSError):
        while True:
            yield pipe.recv()
