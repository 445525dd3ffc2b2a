"""The engine: gives the scheduler's steps to a runner, and hands the tokens that come back to the scheduler.

Launches go to the device back to back, and the engine reads a launch's tokens after it has made `depth` more launches, so that
the device never waits for the host.  One thread at a time may use an engine; `engine_thread.py` has that of all callers.

The engine knows steps and requests.  The scheduler decides what runs next, and the runner knows how a step is run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, TypeVar

from specdec.engine.launches.launch import Launch
from specdec.engine.request import Request
from specdec.engine.scheduler import Scheduler
from specdec.engine.totals import Totals
from specdec.generation import Pending
from specdec.startup import STARTUP
from specdec.steps import RunChunk, Runner, RunRound, Step, Try
from specdec.tables.steps import TableStep

R = TypeVar("R", bound=Runner)

# Chunks that end no prompt emit nothing to wait for.  At most so many of them may be on their way to the device: with more, a
# short prompt that is submitted now would wait for all of them.
MAX_SILENT = 2


class Engine(Generic[R]):
    """Runs a batch of requests; `submit`, `step` and `cancel` are the way in.

    depth: how many launches may be unread when a call of `step` returns; 0 where the device is the host.
    """

    def __init__(self, scheduler: Scheduler, runner: R, depth: int) -> None:
        self.scheduler, self.runner, self.depth = scheduler, runner, depth
        self._unread: deque[tuple[Pending, Launch, list[tuple[Pending, Try]]]] = deque()  # with what was tried before each
        self._silent: deque[Pending] = deque()
        self.table_steps: deque[TableStep] = deque()  # of tables that sources read; any thread may append some
        self._is_busy = False

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_idle

    @property
    def running(self) -> list[Request]:
        """The requests whose prompts have run, in the order of their rows."""
        return [state.request for state in self.scheduler.states if state.runs]

    @property
    def stepped_back(self) -> list[Request]:
        """The requests that have had a row and wait for another one."""
        return [state.request for state in self.scheduler.stepped_back]

    def totals(self) -> Totals:
        """What the engine has done since its start and what it holds now.  Any thread may ask."""
        return self.scheduler.totals_now()

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests: all of them, or none and an error.  PromptTooLong if the KV pool could never hold one."""
        for request in requests:
            self.check(request)
        for request in requests:
            self.scheduler.add(request)

    def check(self, request: Request) -> None:
        """PromptTooLong if the KV pool could never hold the request.  Any thread may ask."""
        self.scheduler.admission.check(request)

    def cancel(self, request: Request) -> None:
        """Ends a request early, wherever it is, and frees its place.  A finished request stays as it is."""
        with self._all_or_none():
            self.scheduler.cancel(request)
            self._settle()

    def step(self) -> None:
        """Launches one pass, of a chunk, a round or both, and hands out the tokens of earlier launches that are due.

        If a chunk fails, the requests whose prompts it holds get its error, and the others go on.  If a round fails, alone or
        with a chunk, all requests that hold rows get its error, and it is raised.
        """
        with self._all_or_none():
            if self.table_steps:  # one at a time, so that no round waits for a whole table
                self._run_table_step()
            growing = self.scheduler.grow()
            self._settle()  # of rows that have stepped back, and what an interrupt may have kept an earlier call from
            if growing:
                self.runner.run(growing)
            if entering := self.scheduler.admit():
                self.runner.run(entering)
            launch = self.scheduler.next()
            is_unread = launch is not None and self._launch(launch)
            while self.scheduler.awaits_tokens and len(self._unread) > (self.depth if is_unread else 0):
                self._collect()
            self._settle()

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """Ends all requests that hold rows if the block raises anything, an interrupt included.

        After such an error nobody can say which rows have moved on and which have not.
        """
        assert not self._is_busy, "one thread at a time, and not from inside a step"
        self._is_busy = True
        try:
            yield
        except BaseException as error:  # an interrupt too: it is raised again once the rows are clear
            self.scheduler.fail_all(error)
            self._settle()
            raise
        finally:
            self._is_busy = False

    def _launch(self, launch: Launch) -> bool:
        """Gives the launch's steps to the runner.  Returns whether the launch will emit tokens."""
        self._copy_pages()
        tries = self._run_before(launch.before)
        while len(self._silent) >= MAX_SILENT and not launch.emits:
            self._silent.popleft().read()
        try:
            pending = self.runner.run(launch.step)
        except Exception as error:  # of any kind, most often a chunk too long for the memory; running requests go on
            # With several ranks the runner has ended all of them by now, and the next step fails with the reason.
            if not isinstance(launch.step, RunChunk):
                raise
            self.scheduler.fail(launch.states, error)
            return False
        self.scheduler.launched(launch)
        assert pending is not None, "chunks and rounds can be waited for"
        if launch.emits:
            self._unread.append((pending, launch, tries))
        else:
            self._silent.append(pending)
        return launch.emits

    def make_ready(self, sizes: Sequence[int] = ()) -> None:
        """Captures what rounds of SpecConfig("auto") may need later, so that no text waits for it.  Nothing while texts run.

        sizes: numbers of rows; none: all that may occur.  Only needs (see `Needs`) that have occurred are thought of.
        """
        with self._all_or_none():
            self._settle()
            if self.scheduler.is_idle:
                for pending, step in self._run_before(self.scheduler.make_ready(sizes)):
                    pending.read()
                    self.scheduler.speculation.tried(step, pending.seconds())

    def run_table_steps(self) -> None:
        """Brings all of the tables to the runner that are under way.  Nothing while texts run: then rounds do, bit by bit."""
        with self._all_or_none():
            while self.table_steps and self.scheduler.is_idle:
                self._run_table_step()

    def _run_table_step(self) -> None:
        try:
            self.runner.run(self.table_steps.popleft())
        except BaseException:  # a table that lacks a part would hold an older one's there, of another scope
            self.table_steps.clear()
            raise

    def _run_before(self, steps: list[Step]) -> list[tuple[Pending, Try]]:
        """Runs steps that emit nothing.  Returns what they measure."""
        tries = []
        for step in steps:
            pending = self.runner.run(step)
            if isinstance(step, Try):
                assert pending is not None, "what is tried can be waited for"
                tries.append((pending, step))
        return tries

    def _copy_pages(self) -> None:
        """Launches the copies of pages that are due."""
        admission = self.scheduler.admission
        try:
            for copy in admission.due_copies:
                self.runner.run(copy)
        except BaseException:  # an interrupt too: nobody knows which copies were made, so none may be found
            admission.forget_copies()
            raise
        admission.due_copies.clear()

    def _collect(self) -> None:
        """Waits for the oldest unread launch, and hands its tokens to the requests."""
        pending, launch, tries = self._unread.popleft()
        emitted = pending.read()
        for tried, step in tries:  # they ran before the launch, so that nobody waits for them
            self.scheduler.speculation.tried(step, tried.seconds())
        timed = isinstance(launch.step, RunRound) and launch.step.timed
        STARTUP.lap("first prefill" if isinstance(launch.step, RunChunk) else "first round")
        STARTUP.end()
        self.scheduler.take(launch, emitted, pending.ended, pending.seconds() if timed else None)

    def _settle(self) -> None:
        """Tells the runner which rows have ended.  Once nobody awaits tokens, unread launches are dropped."""
        if not self.scheduler.awaits_tokens:
            for pending in (*(pending for pending, *_ in self._unread), *self._silent):
                pending.drop()
            self._unread.clear()
            self._silent.clear()
        if departures := self.scheduler.batch.departures():
            self.runner.run(departures)
            self.scheduler.batch.departed()
