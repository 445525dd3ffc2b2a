"""Decides what runs next: turns requests into plain steps for a runner, and hands what comes back to the requests.

Batching is continuous: requests enter free rows in the order of arrival, and their prompts run in chunks between the rounds of
the rows that run already.  Rows get more pages as their texts grow; if there are too few, the youngest row steps back and waits
until it may enter again.  When a request ends, its row and its pages go to the next one.  The scheduler knows requests, rows,
pages and counts: no tensor, no device, no clock.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

from specdec import steps
from specdec.engine.chunks import ChunkBudget
from specdec.engine.failures import no_token
from specdec.engine.launches.launch import Launch, Planned
from specdec.engine.launches.mixing import Mixing
from specdec.engine.launches.rows import BatchRows
from specdec.engine.needs import BatchNeeds, tops_for
from specdec.engine.pages.admission import Admission
from specdec.engine.pages.sharing import RowSharing
from specdec.engine.pages.text_pages import EntryDecision, TextPages
from specdec.engine.request import Request, RequestState, tokens_of
from specdec.engine.speculation import Speculation
from specdec.engine.totals import Totals
from specdec.generation import Emitted


class Scheduler:
    """Holds waiting and running requests, and plans one launch after the other.

    rows: the most requests that hold rows at once.
    pads_rows: whether a round's rows are padded to a power of two, as CUDA graphs need it.
    sharing: decides which rows read common pages together; None: rows never do.
    mixing: sizes the chunks that run in one pass with a round; None: chunks and rounds take turns.
    """

    def __init__(
        self,
        admission: Admission,
        budget: ChunkBudget,
        speculation: Speculation,
        rows: int,
        pads_rows: bool,
        sharing: RowSharing | None = None,
        mixing: Mixing | None = None,
    ) -> None:
        self.pages = TextPages(admission, speculation.most_emitted)
        self.budget, self.speculation, self.sharing = budget, speculation, sharing
        self.batch, self.pads_rows, self.mixing = BatchRows(rows), pads_rows, mixing
        self.waiting: list[RequestState] = []  # in the order of arrival
        self.stepped_back: dict[RequestState, None] = {}  # those of them that have had a row
        self.totals = Totals()
        self.on_enter: Callable[[Request], None] = lambda request: None  # told of every request that gets its first row
        self.on_end: Callable[[Request], None] = lambda request: None  # told of every request that has ended, within a step
        self.on_answer: list[Callable[[Request], None]] = []  # each told of every one that has come to its end
        self._chunk_is_next, self._arrivals, self._batch_needs = True, count(), BatchNeeds()

    @property
    def states(self) -> list[RequestState]:
        """The requests that hold rows; an index is a row."""
        return self.batch.states

    @property
    def admission(self) -> Admission:
        return self.pages.admission

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.states)

    @property
    def awaits_tokens(self) -> bool:
        """Whether any launch can still bring tokens for a request."""
        return bool(self.states) or any(state.unread for state in self.stepped_back)

    def totals_now(self) -> Totals:
        """The totals, with what the scheduler holds now."""
        running, waiting, depths = len(self.states), len(self.waiting), self.speculation.most_emitted - 1
        held = replace(self.totals, running=running, waiting=waiting, depths=depths, **self.admission.usage()._asdict())
        return replace(held, drafting_stopped=int(self.speculation.is_stopped))

    # ---- requests come and go ----

    def add(self, request: Request) -> None:
        """Queues a request that passed `admission.check`."""
        self.waiting.append(RequestState(request, next(self._arrivals)))

    def cancel(self, request: Request) -> None:
        """Ends a request early, wherever it is, and frees its place.  A finished request stays as it is."""
        if request.is_done:
            return
        request.cancelled = True
        self._leave(next(state for state in (*self.states, *self.waiting) if state.request is request))

    def fail(self, states: list[RequestState | None], error: BaseException) -> None:
        """Ends the requests of these rows with that error, except those that have ended already."""
        for state in states:
            if state is not None and not state.request.is_done:
                state.request.error = error
                self._leave(state)

    def fail_all(self, error: BaseException) -> None:
        """Ends all requests that hold rows with that error, and turns all rows into padding.

        It does not matter which of the earlier changes of rows the runner has been told.  An interrupt may have come just after
        a request's last token, while its text was made: that request fails too.  So do those that have stepped back and whose
        tokens are on their way.
        """
        for state in dict.fromkeys([*self.states, *(state for state in self.stepped_back if state.unread)]):
            if not state.request.cancelled and state.request.error is None:
                state.request.error = error
            self._leave(state)
        self.waiting = [state for state in self.waiting if not state.request.is_done]  # an interrupt leaves one in all lists
        self.stepped_back = {state: None for state in self.waiting if state in self.stepped_back}
        self.batch.clear_all()

    def fail_waiting(self, error: BaseException) -> None:
        """Ends all requests that wait with that error."""
        while self.waiting:
            self.waiting[0].request.error = error
            self._leave(self.waiting[0])

    # ---- what runs next ----

    def grow(self) -> steps.GrowRows | None:
        """Gives running rows the pages to which the next round may write.  None: they have them.

        If there are too few, the youngest rows step back; their departures must run before the step.  The oldest one never
        needs to, because what can't fit alone was refused at the door.  So it ends, and every row is the oldest at some time.
        """
        if self.pages.are_sure:
            return None
        while self.pages.are_short([state for state in self.states if state.runs]):
            self._step_back(max(self.states, key=lambda state: state.arrival))
        growths = self.pages.grow([(row, state) for row, state in enumerate(self.states) if state.runs])
        return steps.GrowRows(tuple(growths)) if growths else None

    def admit(self) -> steps.EnterRows | None:
        """Gives free rows and pages to waiting requests, in the order of arrival.  None: no request could enter.

        A request that had better wait for another one's prompt is passed over.
        """
        entries: list[steps.RowEntry] = []
        for state in list(self.waiting):
            if self.batch.is_full or state.unread:
                break
            request = state.request
            ends = self.speculation.is_over(request.num_tokens) or request.drafted_until is not None
            speculates = not ends and self._speculates(request)
            # If it speculates, the pages of those that don't will lack the drafter's keys and values.
            entering = [other for other in self.states if not other.runs and speculates <= self._speculates(other.request)]
            verdict = self.pages.enter(state, speculates, entering)
            if verdict is EntryDecision.WAITS:
                continue
            if verdict is EntryDecision.NO_ROOM:
                break
            request.drafted_until = 0 if ends else None
            self.waiting.remove(state)
            self.stepped_back.pop(state, None)
            self.totals.recomputed_tokens += state.recomputed
            if not request.has_entered:
                self.totals.entered(request)
                self.on_enter(request)
                request.has_entered = True
            entries.append(self.pages.entry(state, len(self.states), speculates))
            self.batch.add(state)
            self._rows_changed()
        return steps.EnterRows(tuple(entries)) if entries else None

    def next(self) -> Launch | None:
        """The next pass: a chunk, a round, or both in one; without `mixing`, or where some request must, they take turns.

        None: there is nothing to launch.
        """
        entering = any(not state.runs for state in self.states)
        running = sum(state.runs and state.tokens_left > 0 for state in self.states)
        if entering and running and self.mixing and not any(state.takes_turns for state in self.states):
            launch = self._next_round()  # planned first, so that prompts which end in the chunk are not among its rows
            (planned,) = launch.planned
            assert isinstance(planned.step, steps.RunRound)
            nodes, left = planned.step.nodes, [state.left for state in self.states if not state.runs]
            budget = self.mixing.budget(self.budget, nodes, left)
            return replace(launch, planned=(planned, self._next_chunk(running, budget)))
        if entering and (self._chunk_is_next or not running):
            self._chunk_is_next = False
            return Launch([], (self._next_chunk(running, self.budget),))
        self._chunk_is_next = True
        return self._next_round() if running else None

    def launched(self, launch: Launch) -> None:
        """Records that the runner has taken the launch: from now on other requests can share the pages of its prompts."""
        for planned in launch.planned:
            if isinstance(planned.step, steps.RunChunk):
                for part, state in zip(planned.step.parts, planned.states, strict=True):
                    if state is not None:
                        self.pages.ran(state, part, self._speculates(state.request))

    def make_ready(self, sizes: Sequence[int]) -> list[steps.Step]:
        """The steps that capture what rounds of so many rows may need; none given: of any number.  To be run while idle."""
        assert not self.states
        return self.speculation.make_ready(sizes or self.sizes())

    def sizes(self) -> list[int]:
        """All numbers of rows that rounds may compute."""
        return sorted({self._padded(rows + 1) for rows in range(self.batch.count)})

    def take(self, launch: Launch, emitted: list[Emitted], ended: Sequence[int], seconds: float | None) -> None:
        """Hands a launch's tokens to its requests.  Requests that have ended since the launch take none.

        ended: see Pending.  seconds: what a timed round took; None if the launch was not timed.
        """
        for planned, own in launch.split(emitted):
            if isinstance(planned.step, steps.RunRound):
                self._take_round(planned, own, ended, seconds)
            else:
                self.totals.chunks += 1
                self._take(planned, own)

    def _take_round(self, planned: Planned, emitted: Sequence[Emitted], ended: Sequence[int], seconds: float | None) -> None:
        step = planned.step
        assert isinstance(step, steps.RunRound)
        self.totals.rounds += 1
        if seconds is not None:
            self.speculation.observe(step, seconds, planned.told(emitted), tokens_of(planned.states))
        for index in ended:
            if (state := planned.states[index]) is not None:
                state.request.drafted_until = max(0, tokens_of([state]) - self.speculation.pause)
        self._take(planned, emitted)

    def _take(self, planned: Planned, emitted: Sequence[Emitted]) -> None:
        """Hands the tokens of one chunk or round to its requests."""
        step = planned.step
        if isinstance(step, steps.RunChunk):
            for part, state, row in zip(step.parts, planned.states, emitted, strict=True):
                if state is not None and (row.tokens or row.scores):
                    state.unread -= bool(row.tokens)
                    if not state.request.is_done:
                        self._hand_out(state, row, None, part.start)
            return
        tree = step.drafted, step.depths
        for state, drafts, row in zip(planned.states, planned.speculates, emitted, strict=False):  # padding comes last
            if state is not None:
                state.unread -= 1
                if not state.request.is_done:
                    state.request.is_halted = row.halted
                    self._hand_out(state, row, tree if drafts else (0, 0))

    def _next_chunk(self, running: int, budget: ChunkBudget) -> Planned:
        entering = [(row, state) for row, state in enumerate(self.states) if not state.runs]
        entering.sort(key=lambda entry: entry[1].arrival)  # not in the order of rows, because rows move when others leave
        shares = budget.share([state.left for _, state in entering], running)
        parts: list[steps.PromptPart] = []
        states: list[RequestState | None] = []
        for (row, state), tokens in zip(entering, shares, strict=True):
            if tokens:
                parts.append(self.pages.next_part(state, row, tokens))
                states.append(state)
                if state.runs:
                    self._rows_changed()
        ending = [state.request for state in states if state is not None and state.runs]
        needs = self._batch_needs.of(request.choice.needs.where(self._speculates(request)) for request in ending)
        cost = sum(self.budget.cost(part.start, len(part.token_ids)) for part in parts)
        cost += sum(self.budget.cost(0, len(part.encoder_input.token_ids)) for part in parts if part.encoder_input)
        drafted = any(self._speculates(state.request) for state in states if state is not None)
        may_capture = self.budget.may_capture(cost, running)
        tops = max(state.request.sampling.prompt_logprobs or 0 for state in states if state is not None)
        return Planned(steps.RunChunk(tuple(parts), needs, drafted, cost, may_capture, tops_for(tops)), states)

    def _next_round(self) -> Launch:
        states = [state if state.runs else None for state in self.states]
        while states[-1] is None:  # rows after the last running one need not be computed
            states.pop()
        rows = self._padded(len(states))
        before: list[steps.Step] = self._stop_drafting(states)
        speculates = tuple(state is not None and self._speculates(state.request) for state in states)
        running, speculating = sum(state is not None for state in states), sum(speculates)
        needs = {state.request.round_needs.where(drafts) for state, drafts in zip(states, speculates, strict=True) if state}
        if self.sharing is not None and self.sharing.group is None:
            # A page that is read for many rows at once reaches all of them if it holds NaN.  So while the drafter runs, rows
            # share no page that it has not written, although only rows that do not speculate would read that page.
            pages = [self.admission.fixed_pages(state.request, speculating > 0) if state else [] for state in states]
            if share := self.sharing.choose(pages):
                before.append(share)
        shared = bool(self.sharing and self.sharing.shares)
        first, step = self.speculation.next_round(
            rows,
            self._batch_needs.of(needs),
            shared,
            speculating / running,
            tokens_of(states) if self.speculation.controller else 0,
            {state.request.shape for state, drafts in zip(states, speculates, strict=True) if state and drafts},
        )
        before += first
        for state in filter(None, states):
            state.unread += 1
        self.pages.launched_round()
        return Launch(before, (Planned(step, states, speculates),))

    def _padded(self, rows: int) -> int:
        """How many rows a round computes for so many running ones."""
        return min(self.batch.count, 1 << (rows - 1).bit_length()) if self.pads_rows else rows

    def _stop_drafting(self, states: list[RequestState | None]) -> list[steps.Step]:
        """The step by which rows in whose texts nothing more is drafted go on plainly, if there are any."""
        rows = []
        for row, state in enumerate(states) if self.speculation.may_be_over else ():
            if state is None or not self._speculates(state.request):
                continue
            if self.speculation.is_over(length := state.request.num_tokens):
                state.request.drafted_until = length - self.speculation.pause
                rows.append(row)
        self._end_pause()
        return [steps.StopDrafting(tuple(rows))] if rows else []

    def _end_pause(self) -> None:
        """Forgets the pause if no running row speculates: then no token is left that the drafter has not seen."""
        if self.speculation.pause and not any(state.runs and self._speculates(state.request) for state in self.states):
            self.speculation.pause = 0

    def _speculates(self, request: Request) -> bool:
        """Whether draft tokens may be accepted for the request, so that the drafter must know its text."""
        return request.speculate and bool(self.speculation.shapes) and request.drafted_until is None

    # ---- endings ----

    def _hand_out(self, state: RequestState, emitted: Emitted, tree: tuple[int, int] | None, start: int = 0) -> None:
        """Gives a request its tokens.  If that fails, because of its tokenizer for example, only this request fails.

        tree: how many draft tokens and levels the round's tree had; None: of a chunk.  start: where its part begins.
        """
        request, before = state.request, len(state.request.output.token_ids)
        try:
            if emitted.scores:
                request.take_scores(start, emitted.scores)
            if not emitted.tokens:
                return
            if emitted.tokens[-1] < 0:  # no token is accepted after such a one, so it is always the last of its launch
                raise no_token(request, emitted.tokens[:-1], is_first=tree is None)
            if tree is None:
                request.take_first(emitted)
            else:
                request.take_round(emitted, *tree)
                self.totals.drafted += tree[0]
                if tree[1]:
                    self.totals.paths[tree[1], len(emitted.tokens) - 1] += 1
        except Exception as error:  # of any kind: whoever asks for the result gets it
            request.error = error
        self.totals.output_tokens += len(request.output.token_ids) - before
        if request.is_done:
            self._leave(state)

    def _leave(self, state: RequestState) -> None:
        """Ends a request, wherever it is."""
        if state in self.states:
            self._vacate(state)
        else:
            self.waiting.remove(state)
            self.stepped_back.pop(state, None)
        self._ended(state.request)

    def _step_back(self, state: RequestState) -> None:
        """Takes a request's row and pages for older ones.  It waits with all that it has written, and keeps its place in the
        order of arrival.  Tokens of launches in flight are handed to it as they come.
        """
        self.totals.stepped_back += 1
        insort(self.waiting, state, key=lambda state: state.arrival)
        self.stepped_back[state] = None
        self._vacate(state)

    def _vacate(self, state: RequestState) -> None:
        """Frees the request's pages and its row."""
        speculates = self._speculates(state.request)
        self.batch.remove(state)
        self.pages.leave(state, speculates, self.speculation.pause if speculates else 0)
        self._rows_changed()
        self._end_pause()
        if not self.states:
            self._chunk_is_next = True

    def _ended(self, request: Request) -> None:
        if request.has_entered and request.error is None:
            self.admission.lengths.add(len(request.output.token_ids))
            for told in () if request.cancelled else self.on_answer:
                told(request)
        self.totals.ended(request)
        self.on_end(request)

    def _rows_changed(self) -> None:
        self.pages.look_again()
        if self.sharing is not None:
            self.sharing.forget()
