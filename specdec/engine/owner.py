"""One thread owns the engine, and everybody else talks to it through a queue.

So requests of any number of callers share one batch, a caller that is interrupted or slow disturbs nobody, and the engine
itself needs no locks.  This module knows requests and threads; it knows no device and no event loop.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from specdec.engine.loop import Engine
from specdec.engine.mailbox import Mailbox
from specdec.engine.request import Request

# After an error the engine tells its runner which rows have ended.  If that fails as well, in so many steps in a row, nothing
# can run any more: most often the GPU has failed, after which every call to it fails.
MOST_UNCLEAN_STEPS = 3


class EngineOwner:
    """Runs an engine on a thread of its own, which begins with the first request.

    failure: what broke the engine for good; None while it works.
    """

    def __init__(self, engine: Engine[Any]) -> None:
        self.engine = engine
        self.failure: BaseException | None = None
        self.turn = threading.Lock()  # held by whoever uses the engine; the benchmark steps it on another thread, for example
        # SimpleQueue.put may be called from anywhere, also by Python's garbage collector in the middle of another put.
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._mailboxes: dict[Request, Mailbox] = {}
        self._ended: deque[Request] = deque()
        engine.scheduler.on_end = self._note_end
        self._unclean = 0
        self._thread: threading.Thread | None = None
        self._is_served = threading.Lock()  # held by the thread that serves the engine
        # No request comes in once the owner is closed.  A signal handler or the garbage collector may close it at any point,
        # also while the same thread hands in a request.
        self._door = threading.RLock()
        self.is_closed = self._is_released = False
        self._process = os.getpid()

    # ---- for any thread ----

    @property
    def is_fork(self) -> bool:
        """Whether this process is a fork of the one that made the owner."""
        return os.getpid() != self._process

    @property
    def _is_inside(self) -> bool:
        """Whether the caller is the engine's own thread."""
        return self._thread is not None and threading.get_ident() == self._thread.ident

    def submit(self, requests: Sequence[tuple[Request, bool]], wake: Callable[[], None]) -> list[Mailbox]:
        """Hands requests to the engine, and returns a mailbox for each.

        requests: each with whether its chunks are wanted while it runs.
        wake: see Mailbox; it is called for every one of these requests.

        RuntimeError where no request can be taken (see `check_open`), or one of them was handed in before.  The requests must
        have passed `Engine.check`.
        """
        now = time.monotonic()
        mailboxes = [Mailbox(request, streaming, wake, now) for request, streaming in requests]
        with self._door:
            self.check_open()
            for request, _ in requests:
                request.take_turn()
            self._commands.put(lambda: self._add(mailboxes))
            self._start()
            self.check_open()  # again: a signal handler may have closed the owner in the meantime
        return mailboxes

    def cancel(self, request: Request) -> None:
        """Ends a request as soon as the step under way is over, and frees its place.  A finished request stays as it is.

        Nobody waits for that, so the garbage collector may call this at any point.
        """
        if not self.is_closed and not self.is_fork:
            self._commands.put(lambda: self._cancel(request))

    def settle(self) -> None:
        """Waits until everything that was put before, cancellations for example, has been carried out."""
        done = threading.Event()
        with self._door:
            self._commands.put(done.set)
            self._start()
        while not done.wait(0.1) and self._thread is not None and self._thread.is_alive():
            pass

    def check_open(self) -> None:
        """RuntimeError if no request can be taken: in a forked process, from inside a step, after `close` or a failure."""
        if self.is_fork:
            raise RuntimeError(
                f"this decoder was made by process {self._process} and can't be used in its fork {os.getpid()}: load the model "
                "in the child, or start children with multiprocessing.get_context('spawn')"
            )
        if self._is_inside:
            raise RuntimeError(
                "a decoder can't be called from inside itself, by its tokenizer for example; nearest thing that works: call it "
                "from another thread"
            )
        if self.is_closed:
            raise RuntimeError("this decoder is closed; nearest thing that works: load another one")
        if self.failure is not None:
            raise RuntimeError(f"this decoder has failed for good and must be loaded again: {self.failure}") from self.failure

    def close(self) -> None:
        """Ends all requests with an error and the thread; waits for the step under way.  To be called once or more often."""
        if self.is_fork:  # it has no such thread, and its locks may be held for ever
            return
        with self._door:
            self.is_closed = True
            self._commands.put(lambda: None)  # wakes the thread
        thread = self._thread
        if thread is not None and thread.is_alive() and not self._is_inside:
            thread.join()

    def release(self) -> None:
        """Lets the engine go after `close`, so that its memory can be freed.  From inside a step: at the end of the thread."""
        assert self.is_closed
        self._is_released = True
        if not self._is_inside:
            self.__dict__.pop("engine", None)  # another thread may have closed the decoder at the same time

    # ---- the thread ----

    def _start(self) -> None:
        # An interrupt may have kept an earlier thread from starting.
        if not self.is_closed and (self._thread is None or not self._thread.is_alive()):
            # A daemon, so that a program that forgets to close its decoder can end; whoever makes an owner closes it then.
            self._thread = threading.Thread(target=self._run, name="specdec engine", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        """Serves the engine until the owner is closed, unless another thread does."""
        if not self._is_served.acquire(blocking=False):
            return
        self._thread = threading.current_thread()
        try:
            self._serve()
            error: BaseException = RuntimeError("the decoder was closed while the request ran")
        except BaseException as fault:  # an error in this module: nobody must wait for ever for what does not run
            with self._door:
                self.failure = error = fault
        with self.turn:
            self._fail(error)
        if self._is_released:
            self.__dict__.pop("engine", None)

    def _serve(self) -> None:
        """Carries out commands and steps the engine while any of its requests is under way."""
        while not self.is_closed:
            command = None if self._mailboxes else self._commands.get()
            with self.turn:
                if command is not None:
                    command()
                    command = None  # it holds requests, which would stay in memory for as long as the thread waits
                while not self._commands.empty():
                    self._commands.get()()
                if self._mailboxes and not self.is_closed:
                    self._step()
                    self._deliver()

    def _add(self, mailboxes: list[Mailbox]) -> None:
        for mailbox in mailboxes:
            self._mailboxes[mailbox.request] = mailbox
            try:
                if self.failure is not None:  # the request came while the engine broke
                    raise self.failure
                self.engine.submit([mailbox.request])
            except BaseException as error:
                mailbox.request.error = error
                self._ended.append(mailbox.request)
        if self._ended:
            self._deliver()

    def _cancel(self, request: Request) -> None:
        if request in self._mailboxes:
            self._guarded(lambda: self.engine.cancel(request))
            self._deliver()

    def _step(self) -> None:
        self._guarded(self.engine.step)

    def _guarded(self, action: Callable[[], None]) -> None:
        """Runs something on the engine.  What it raises has reached the requests concerned; it must not end the thread."""
        if self.failure is not None:
            return
        try:
            action()
            self._unclean = 0
        except BaseException as error:  # of any kind: a tokenizer may raise SystemExit
            self._unclean = 0 if self.engine.is_clean else self._unclean + 1
            if self._unclean >= MOST_UNCLEAN_STEPS:
                self.failure = error
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Ends everything with that error: the engine is not to run again, and may be unable to."""
        while not self._commands.empty():  # requests that came in the meantime
            self._commands.get()()
        self.engine.fail_everything(error)
        self._deliver()

    def _deliver(self) -> None:
        """Puts all news into the mailboxes, and forgets the requests that have ended."""
        ended = [self._mailboxes.pop(self._ended.popleft()) for _ in range(len(self._ended))]
        running = [self._mailboxes[request] for request in self.engine.running if request in self._mailboxes]
        for error in {id(mailbox.request.error): mailbox.request.error for mailbox in ended}.values():
            forget_locals(error)
        now, totals = time.monotonic(), self.engine.scheduler.totals
        for mailbox in (*ended, *running):
            try:
                mailbox.collect(now, totals)
            except Exception:  # the caller has gone without a word: its event loop is closed, for example
                self.cancel(mailbox.request)

    def _note_end(self, request: Request) -> None:
        """Remembers a request that has ended within the step under way.  Whoever steps the engine itself has no mailbox."""
        if request in self._mailboxes:
            self._ended.append(request)


def forget_locals(error: BaseException | None) -> None:
    """Empties the frames that an error came through; whoever kept it would keep tensors and other requests with them.

    Its traceback still names the lines.
    """
    trace = None if error is None else error.__traceback__
    traceback.clear_frames(trace)
    frame = None if trace is None else trace.tb_frame.f_back  # the callers of the function that has caught it
    while frame is not None:
        with suppress(RuntimeError):  # a function that still runs
            frame.clear()
        frame = frame.f_back
