"""Connects the processes of all ranks, and passes the first rank's messages to the others.

The first rank lives in the caller's process.  Each other rank is a process of its own that runs a function until its messages
end.  Two connections hold them together: a `Group`, for exchanges of tensors, and a pipe between the first rank and each other
one.  A rank that ends early closes its pipe, which ends all waiting for it with an error; if the first rank's process ends, the
others leave.  This module knows no model and no step.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import signal
import socket
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from specdec.parallel.group import ALONE, GlooGroup, Group

HOST = "127.0.0.1"
PATIENCE = timedelta(seconds=60)  # that ranks wait for each other when they connect
# That a rank which is ready waits for the slowest: many that import at once from a slow disk take minutes.  The end of one of
# them ends the others' waiting at once.
START_PATIENCE = timedelta(seconds=600)
END_SECONDS = 5.0  # that a rank is given to leave by itself
WORD_SECONDS = 3.0  # that the word of a rank's end may take to arrive, once an exchange with it has failed
SILENCE_SECONDS = 0.3  # that the end of a rank may take to be seen, once another one has told an error
END = None  # the message after the last one

T = TypeVar("T")


class RankFailed(RuntimeError):
    """Another rank has ended with an error."""


class Rendezvous(NamedTuple):
    """A rank's place.  store: where all ranks find each other."""

    rank: int
    size: int
    store: dist.Store

    def join(self, device: torch.device) -> Group:
        """Connects to the other ranks, which do the same: through GPUs' memory and NCCL if they have one each, else gloo.

        The first rank calls it when all of them are ready.
        """
        if self.rank == 0:
            self.store.set("all are here", "")
        else:
            self.store.wait(["all are here"], START_PATIENCE)
        if device.type == "cpu":
            return GlooGroup(dist.ProcessGroupGloo(self.store, self.rank, self.size, PATIENCE), self.rank, self.size)
        from specdec.parallel.nccl import NcclGroup, new_name
        from specdec.parallel.symmetric.group import connect

        if self.rank == 0:
            self.store.set("nccl", new_name().hex())
        name = bytes.fromhex(self.store.get("nccl").decode())
        return connect(NcclGroup(name, self.rank, self.size, device), device)


class RankPipe:
    """Another rank's end of the pipe to the first rank."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        threading.Thread(target=self._watch, name="specdec first rank", daemon=True).start()

    def tell(self, word: str, text: str = "") -> None:
        """Tells the first rank that this one has come as far as `word`, or that it has "failed", and why."""
        with contextlib.suppress(OSError):  # the first rank may be gone
            self._pipe.send((word, text))

    def messages(self) -> Iterator[Any]:
        """The first rank's messages, until it sends the last one.

        If the first rank is gone before, this process ends at once: its device may wait for that rank, and Python's own end
        would wait for the device.
        """
        try:
            while (message := self._pipe.recv()) is not END:
                yield message
        except (EOFError, OSError):
            os._exit(1)

    def _watch(self) -> None:
        """Ends this process soon after the first rank is gone: its own thread may wait for that rank's device for ever."""
        gone = select.poll()
        gone.register(self._pipe.fileno(), select.POLLHUP | getattr(select, "POLLRDHUP", 0))
        gone.poll()
        time.sleep(END_SECONDS)
        os._exit(1)


# What another rank runs: it is given its place, and its pipe to the first rank.
RankWork = Callable[[Rendezvous, RankPipe], None]


class OtherRanks:
    """All ranks but the first, as the first one sees them.

    pipes: to each.  processes: theirs, if this process has started them.  silence: see SILENCE_SECONDS.
    word_seconds: see WORD_SECONDS.
    failure: why a rank has failed, the first one included; empty while all are well.
    group: the first rank's, once it has joined; its exchanges end if a rank fails, and at `close`.  device: where they run.
    """

    def __init__(
        self, rendezvous: Rendezvous, pipes: list[Connection], processes: list[Any], silence: float = SILENCE_SECONDS
    ) -> None:
        self._silence, self.word_seconds = silence, WORD_SECONDS
        self.rendezvous, self._pipes, self._processes = rendezvous, pipes, processes
        self.failure = ""
        self.group: Group = ALONE
        self.device = torch.device("cpu")
        self._words, self._waited = Counter[str](), Counter[str]()
        self._news = threading.Condition()
        self._is_ending = False
        self._listener = threading.Thread(target=self._listen, name="specdec ranks", daemon=True)
        self._listener.start()

    def join(self, device: torch.device) -> None:
        """Connects this rank to the others, once all of them are ready for it."""
        self.wait("here")
        self.group, self.device = self._unless_failed(lambda: self.rendezvous.join(device)), device

    def send(self, message: Any) -> None:
        """Passes a message to every rank.  RankFailed, with the reason, if one has failed."""
        self.check()
        for pipe in self._pipes:
            try:
                pipe.send(message)
            except OSError as error:
                raise self.explain(error) from error

    def wait(self, word: str) -> None:
        """Waits until all ranks have come as far as `word` once more.  RankFailed, with the reason, if one has failed."""
        self._waited[word] += len(self._pipes)
        with self._news:
            self._news.wait_for(lambda: self.failure or self._words[word] >= self._waited[word])
        self.check()

    def check(self) -> None:
        """RankFailed, with the reason, if a rank has failed."""
        if not self.failure and (problem := self.group.problem()):
            self._fail(problem)
        if self.failure:
            raise RankFailed(self.failure)

    def explain(self, error: BaseException) -> BaseException:
        """What to raise for an error of this rank within work of all ranks, after which none of them can go on.

        That is RankFailed if another rank failed first, which may have made this one fail.
        """
        with self._news:
            seconds = 0.0 if isinstance(error, KeyboardInterrupt) else self.word_seconds
            self._news.wait_for(lambda: self.failure, timeout=seconds)
        if self.failure:
            return error if isinstance(error, RankFailed) else RankFailed(self.failure)
        self._fail(f"rank 0 failed: {type(error).__name__}: {error}")
        return error

    def close(self) -> None:
        """Ends the messages, and the processes that do not leave by themselves.  A second call does nothing.

        What runs on this rank's device is waited for, as it may need the others.
        """
        self._is_ending = True
        if self.device.type == "cuda" and not self.failure:
            torch.cuda.synchronize(self.device)
        for pipe in self._pipes:
            with contextlib.suppress(OSError, ValueError):
                pipe.send(END)
        self._listener.join(END_SECONDS)
        self._end_all()
        self._abort().join(END_SECONDS)

    def _unless_failed(self, work: Callable[[], T]) -> T:
        """What `work` gives.  RankFailed as soon as a rank fails: work may then wait for ever, and is left alone with that."""
        given: Future[T] = Future()

        def run() -> None:
            try:
                given.set_result(work())
            except BaseException as error:
                given.set_exception(error)
            with self._news:
                self._news.notify_all()

        threading.Thread(target=run, name="specdec connects", daemon=True).start()
        with self._news:
            self._news.wait_for(lambda: self.failure or given.done())
        self.check()
        return given.result()

    # ---- what ends ranks ----

    def _listen(self) -> None:
        """Takes what the other ranks tell, until all of them have ended."""
        rank_of = {pipe: rank for rank, pipe in enumerate(self._pipes, 1)}
        while rank_of:
            for pipe in wait(list(rank_of)):
                assert isinstance(pipe, Connection)
                if pipe not in rank_of:  # its end was seen while another rank's error was looked into
                    continue
                try:
                    word, text = pipe.recv()
                except (EOFError, OSError):
                    word, text = "failed", "it has ended without a word"
                    rank = rank_of.pop(pipe)
                    if self._is_ending or self.failure:
                        continue
                    text += self._exit_code(rank)
                else:
                    rank = rank_of[pipe]
                if word == "failed":
                    self._fail(self._ended_silently(rank_of, rank) or f"rank {rank} failed: {text}")
                with self._news:
                    self._words[word] += 1
                    self._news.notify_all()

    def _ended_silently(self, rank_of: dict[Connection, int], first: int) -> str:
        """The rank that has ended without a word; empty if none has.  first: a rank that has told an error.

        That error may come of the other's end, and be told sooner.  A rank that has told an error ends too.
        """
        told, until = {first}, time.monotonic() + self._silence
        while not self.failure and (left := until - time.monotonic()) > 0:
            for pipe in wait(list(rank_of), left):
                assert isinstance(pipe, Connection)
                rank = rank_of[pipe]
                try:
                    pipe.recv()
                    told.add(rank)
                except (EOFError, OSError):
                    del rank_of[pipe]
                    if rank not in told:
                        return f"rank {rank} failed: it has ended without a word{self._exit_code(rank)}"
            if not rank_of:
                break
        return ""

    def _fail(self, reason: str) -> None:
        with self._news:
            if self.failure:
                return
            self.failure = reason
            self._news.notify_all()
        self._abort()
        self._end_all(seconds=0.0)

    def _abort(self) -> threading.Thread:
        """Ends this rank's exchanges, on a thread: NCCL waits there for the graphs in which they were captured to go."""
        thread = threading.Thread(target=self.group.abort, name="specdec abort", daemon=True)
        thread.start()
        return thread

    def _exit_code(self, rank: int) -> str:
        if not self._processes:
            return ""
        process = self._processes[rank - 1]
        process.join(1.0)
        unguarded = process.exitcode == 1 and not self._words  # as Python's own refusal of a start within a start
        hint = "; a script that starts ranks must do so below `if __name__ == '__main__':`" if unguarded else ""
        return f", with exit code {process.exitcode}{hint}"

    def _end_all(self, seconds: float = END_SECONDS) -> None:
        """Ends ranks that have not ended: their processes, or else the pipes, on whose end they leave."""
        for process in self._processes:
            process.join(seconds)
            if process.exitcode is None:
                process.kill()
                process.join(END_SECONDS)  # the driver may need a moment to take back a GPU that still runs
        if not self._processes:
            for pipe in self._pipes:
                with contextlib.suppress(OSError, ValueError), socket.socket(fileno=os.dup(pipe.fileno())) as line:
                    line.shutdown(socket.SHUT_RDWR)


def start(size: int, work: RankWork) -> OtherRanks:
    """Starts all ranks but the first as processes of this machine.  work: what they run, a function of a module (pickled)."""
    context = multiprocessing.get_context("spawn")  # CUDA forbids fork
    store = dist.TCPStore(HOST, 0, size, is_master=True, timeout=PATIENCE, wait_for_workers=False)
    pipes: list[Connection] = []
    processes: list[Any] = []
    for rank in range(1, size):
        mine, theirs = context.Pipe()
        given = work, rank, size, store.port, theirs
        process = context.Process(target=_run, args=given, name=f"rank {rank}", daemon=True)
        process.start()
        theirs.close()  # so that the pipe ends when the process does
        pipes.append(mine)
        processes.append(process)
    return OtherRanks(Rendezvous(0, size, store), pipes, processes)


def _run(work: RankWork, rank: int, size: int, port: int, pipe: Connection) -> None:
    """What the process of another rank does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the first rank's, which ends the others
    warnings.filterwarnings("ignore", module=r"specdec\.")  # the first rank is on this machine, and warns of the same
    store = dist.TCPStore(HOST, port, size, is_master=False, timeout=PATIENCE, wait_for_workers=False)
    run_work(work, Rendezvous(rank, size, store), RankPipe(pipe))
    os._exit(0)  # Python's own end would give back the device's memory piece by piece, while the first rank waits


def run_work(work: RankWork, rendezvous: Rendezvous, pipe: RankPipe) -> None:
    """Runs the work of another rank.  An error is told to the first rank and ends this process at once.

    A rank that failed leaves others waiting on the device, which nothing of this process may wait for in turn.
    """
    try:
        work(rendezvous, pipe)
    except BaseException as error:
        pipe.tell("failed", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        os._exit(1)
