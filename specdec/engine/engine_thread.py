"""One thread owns the engine, and everybody else talks to it through a queue.

So requests of any number of callers share one batch, a caller that is interrupted or slow disturbs nobody, and the engine
itself needs no locks.  This module knows requests and threads; it knows no device and no event loop.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Protocol

from specdec.engine.loop import Engine
from specdec.engine.output_queue import OutputQueue
from specdec.engine.request import Request
from specdec.tables.steps import TableStep

# After an error the engine tells its runner which rows have ended.  If that fails as well, in so many steps in a row, nothing
# can run any more: most often the GPU has failed, after which every call to it fails.  The same holds of errors that end no
# request: the next step would raise them again, for ever.
MAX_UNCLEAN_STEPS = 3


class IdleWork(Protocol):
    """What the thread does while no request is there.  has_work: whether there is anything.

    is_due: whether a part of it is to run now, though requests are there.
    """

    @property
    def has_work(self) -> bool: ...

    @property
    def is_due(self) -> bool: ...

    def work(self, engine: Engine[Any], is_wanted: Callable[[], bool]) -> None:
        """A part of it, which should end soon after the thread is wanted for something else."""

    def work_between(self, engine: Engine[Any]) -> None:
        """A small part of it, between two steps."""


_threads: weakref.WeakSet[EngineThread] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """At the end of the program: a thread that is still in a step when Python goes away would crash."""
    for thread in list(_threads):
        thread.close()


class EngineThread:
    """Runs an engine on a thread of its own, which begins with the first request.

    begin: called first on that thread.
    failure: what broke the engine for good; None while it works.
    is_closed: whether no request is taken any more.
    """

    def __init__(self, engine: Engine[Any], begin: Callable[[], object] = lambda: None) -> None:
        self.engine, self._begin = engine, begin
        self.failure: BaseException | None = None
        self.turn = threading.Lock()  # held by whoever uses the engine; the benchmark steps it on its own thread, for example
        # SimpleQueue.put may be called from anywhere, also by Python's garbage collector in the middle of another put.
        self._commands: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._output_queues: dict[Request, OutputQueue] = {}
        self._ended: deque[Request] = deque()
        self.idle_work: IdleWork | None = None
        engine.scheduler.on_enter, engine.scheduler.on_end = self._note_entry, self._note_end
        self._unclean = 0
        self._thread: threading.Thread | None = None
        self._is_served = threading.Lock()  # held by the thread that serves the engine
        # No request comes in once this is closed.  A signal handler may close it at any point, also while the thread that
        # it interrupts hands in a request.
        self._door = threading.RLock()
        self.is_closed = False
        self._process = os.getpid()
        self.at_close: list[Callable[[], object]] = []  # called by `close`
        self._asked: tuple[bool, object] | None = None  # what `set_drafting` was last told, until the engine does so
        _threads.add(self)

    # ---- for any thread ----

    @property
    def is_fork(self) -> bool:
        """Whether this process is a fork of the one that made this object."""
        return os.getpid() != self._process

    def submit(self, requests: Sequence[Request], wake: Callable[[], None]) -> list[OutputQueue]:
        """Hands requests that have passed `Engine.check` to the engine.  Returns an output queue for each.  wake: see there.

        RuntimeError where no request can be taken (see `check_open`).  ValueError for a request that was submitted before,
        TypeError for what is none.
        """
        for request in requests:
            if not isinstance(request, Request):
                raise TypeError(f"request must come from new_request, got {request!r} of type {type(request).__name__}"[:400])
        now = time.monotonic()
        queues = [OutputQueue(request, wake, now) for request in requests]
        with self._door:
            self.check_open()
            if any(request.is_submitted for request in requests):
                raise ValueError("a request runs only once; nearest thing that works: make another one of the same prompt")
            for request in requests:
                request.is_submitted = True
            self._commands.put(lambda: self._add(queues))
            self._start()
            self.check_open()  # again: a signal handler may have closed this in the meantime
        return queues

    def cancel(self, request: Request) -> None:
        """Ends a request as soon as the step under way is over, and frees its place.  A finished request stays as it is.

        Nobody waits for that, so the garbage collector may call this at any point.
        """
        if not self.is_closed and not self.is_fork:
            self._commands.put(lambda: self._cancel(request))

    def bring_tables(self, steps: Sequence[TableStep]) -> None:
        """Has the engine run these steps, in their order: one before each of its own steps, or all at once while it is idle."""
        with self._door:
            if not self.is_closed and not self.is_fork:
                self.engine.table_steps.extend(steps)
                self._commands.put(lambda: self._guarded(self.engine.run_table_steps))
                self._start()

    def is_behind_with_tables(self) -> bool:
        """Whether steps of `bring_tables` are still to be run; what the last text has left of them runs soon."""
        if self.is_closed or self.failure is not None or not self.engine.table_steps:
            return False
        self.bring_tables(())
        return True

    def set_drafting(self, enabled: bool) -> None:
        """Whether anything is drafted, from the next step on.  What runs goes on plainly, and drafts no more if it is enabled
        again; the texts are the same.
        """

        asked = (enabled, object())

        def change() -> None:
            self.engine.scheduler.speculation.is_stopped = not enabled
            if self._asked is asked:
                self._asked = None

        with self._door:
            if not self.is_closed and not self.is_fork:
                self._asked = asked
                self._commands.put(change)
                self._start()

    @property
    def is_drafting(self) -> bool:
        """Whether anything is drafted, from the next step on."""
        asked = self._asked
        return not self.engine.scheduler.speculation.is_stopped if asked is None else asked[0]

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
        self.check_outside()
        if self.is_closed:
            raise RuntimeError("this decoder is closed; nearest thing that works: load another one")
        if self.failure is not None:
            raise RuntimeError(f"this decoder has failed for good and must be loaded again: {self.failure}") from self.failure

    def check_outside(self) -> None:
        """RuntimeError on the engine's own thread, which can't wait for itself."""
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "a decoder can't be called from inside itself, by its tokenizer for example; nearest thing that works: call it "
                "from another thread"
            )

    def close(self) -> None:
        """Ends all requests with an error and the thread; waits for the step under way.  To be called once or more often."""
        if self.is_fork:  # it has no such thread, and its locks may be held for ever
            return
        with self._door:
            self.begin_to_close()
        thread = self._thread
        if thread is not None and threading.current_thread() is not thread:
            thread.join()

    def begin_to_close(self) -> None:
        """The same without waiting, for the garbage collector: whoever it interrupts may hold what a step waits for."""
        if self.is_fork:
            return
        self.is_closed = True
        self._commands.put(lambda: None)  # wakes the thread
        while self.at_close:
            self.at_close.pop()()

    def release(self) -> None:
        """Lets the engine go after `close`, so that its memory can be freed."""
        assert self.is_closed
        del self.engine

    # ---- the thread ----

    def _start(self) -> None:
        # An interrupt may have kept an earlier thread from starting, or from being seen to have started.
        has_thread = self._is_served.locked() or (self._thread is not None and self._thread.is_alive())
        if not self.is_closed and not has_thread:
            # A daemon, so that a program that forgets to close its decoder can end; `_close_all` ends the thread then.
            self._thread = threading.Thread(target=self._run, name="specdec engine", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        """Carries out commands and steps the engine while any of its requests is under way, unless another thread does."""
        if not self._is_served.acquire(blocking=False):
            return
        self._thread = threading.current_thread()
        with suppress(RuntimeError):  # Python is about to end, and starts no thread any more
            self._begin()
        while not self.is_closed:
            command = None if self._output_queues or self._has_idle_work else self._commands.get()
            with self.turn:
                try:
                    self._turn(command)
                except BaseException as error:  # a fault of this class, or of a caller's `wake`: nobody may wait for ever
                    self._give_up(error)
            command = None  # it holds requests, which would stay in memory for as long as the thread waits
        closed = RuntimeError("the decoder was closed while the request ran")
        with self.turn:
            try:
                self._fail(closed)
            except BaseException:  # as above
                self._give_up(closed)

    def _turn(self, command: Callable[[], None] | None) -> None:
        """Carries out this command and all that have come meanwhile, and then one step."""
        if command is not None:
            command()
        while not self._commands.empty():
            self._commands.get()()
        if self._output_queues and not self.is_closed:
            self._guarded(self.engine.step)
            self._deliver()
            # After a step that failed nothing else may end well, or MAX_UNCLEAN_STEPS would never be counted.
            if self.idle_work is not None and not self._unclean and self.idle_work.is_due:
                self._guarded(self._work_between)
        elif self._has_idle_work and not self.is_closed:
            self._guarded(self._work_idle)

    @property
    def _has_idle_work(self) -> bool:
        return self.idle_work is not None and self.failure is None and self.engine.is_idle and self.idle_work.has_work

    def _work_idle(self) -> None:
        assert self.idle_work is not None
        self.idle_work.work(self.engine, lambda: self.is_closed or not self._commands.empty())

    def _work_between(self) -> None:
        assert self.idle_work is not None
        self.idle_work.work_between(self.engine)

    def _add(self, queues: list[OutputQueue]) -> None:
        for queue in queues:
            self._output_queues[queue.request] = queue
            try:
                if self.failure is not None:  # the request came while the engine broke
                    raise self.failure
                self.engine.submit([queue.request])
            except BaseException as error:  # of any kind: this request gets it, and the thread goes on
                queue.request.error = error
                self._ended.append(queue.request)
        if self._ended:
            self._deliver()

    def _cancel(self, request: Request) -> None:
        if request in self._output_queues:
            self._guarded(lambda: self.engine.cancel(request))
            self._deliver()

    def _guarded(self, action: Callable[[], None]) -> None:
        """Runs something on the engine.  What it raises has reached the requests concerned; it must not end the thread."""
        if self.failure is not None:
            return
        try:
            action()
            self._unclean = 0
        except BaseException as error:  # of any kind: a tokenizer may raise SystemExit
            has_told = self.engine.scheduler.batch.departures() is None  # the runner, of all rows that have ended
            self._unclean = 0 if has_told and self._ended else self._unclean + 1
            if self._unclean >= MAX_UNCLEAN_STEPS:
                self.failure = error
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Ends everything with that error: the engine is not to run again, and may be unable to."""
        while not self._commands.empty():  # requests that came in the meantime
            self._commands.get()()
        self.engine.scheduler.fail_all(error)
        self.engine.scheduler.fail_waiting(error)
        self._deliver()

    def _give_up(self, error: BaseException) -> None:
        """Ends everything with that error when the books of this class can't be trusted any more."""
        self.failure = error
        for queue in self._output_queues.values():
            queue.request.error = queue.request.error or error
            queue.is_done = True
            with suppress(BaseException):
                queue.wake()
        self._output_queues.clear()
        self._ended.clear()

    def _deliver(self) -> None:
        """Puts all news into the output queues, and forgets the requests that have ended."""
        ended = [self._output_queues.pop(self._ended.popleft()) for _ in range(len(self._ended))]
        under_way = (*self.engine.running, *self.engine.stepped_back)
        running = [self._output_queues[request] for request in under_way if request in self._output_queues]
        for queue in ended:
            without_frames(queue.request.error)
        now, totals = time.monotonic(), self.engine.scheduler.totals
        for queue in (*ended, *running):
            try:
                queue.collect(now, totals)
            except Exception:  # the caller has gone without a word: its event loop is closed, for example
                self.cancel(queue.request)

    def _note_entry(self, request: Request) -> None:
        """Counts how long a request has waited.  Whoever steps the engine alone has no queue."""
        if (queue := self._output_queues.get(request)) is not None:
            queue.entered(time.monotonic(), self.engine.scheduler.totals)

    def _note_end(self, request: Request) -> None:
        """Remembers a request that has ended within the step under way.  Whoever steps the engine alone has no queue."""
        if request in self._output_queues:
            self._ended.append(request)


def without_frames(error: BaseException | None) -> None:
    """Turns the traceback of an error into text, and those of the errors that it came from.

    Frames hold tensors and other requests, which would stay in memory for as long as somebody keeps the error.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # whoever sets causes by hand may close a circle
        seen.add(id(error))
        if error.__traceback__ is not None:
            error.add_note("Raised in the engine's thread:\n" + "".join(traceback.format_tb(error.__traceback__)).rstrip())
            error.__traceback__ = None
        error = error.__cause__ or error.__context__
