"""Decides what runs next: turns requests into plain steps for a runner, and hands what comes back to the requests.

Batching is continuous: requests enter free rows in the order of arrival, and their prompts run in chunks between the rounds of
the rows that run already.  When a request ends, its row and its pages go to the next one.  The scheduler knows requests, rows,
pages and counts: no tensor, no device, no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count

from specdec import steps
from specdec.engine.chunks import ChunkBudget
from specdec.engine.failures import no_token
from specdec.engine.needs import BatchNeeds
from specdec.engine.pages.admission import Admission
from specdec.engine.pages.sharing import RowSharing
from specdec.engine.request import Request, Seat
from specdec.engine.speculation import Speculation
from specdec.engine.totals import Totals

# Capturing a chunk's graph takes as long as an eager pass, and only then does the graph run.  So between rounds of running
# rows, only chunks that cost at most a quarter of the budget are captured: the rows wait no longer for such a chunk than for a
# chunk that uses the whole budget.
CAPTURE_SHARE = 4


@dataclass(frozen=True)
class Launch:
    """One chunk or round for the runner.

    before: steps that must run before it.
    seats: who held each part of the chunk, or each row of the round, when it was planned; None for a row of a round that does
        not run.
    speculates: of a round, which of its rows may accept draft tokens.
    """

    before: list[steps.Step]
    step: steps.RunChunk | steps.RunRound
    seats: list[Seat | None]
    speculates: tuple[bool, ...] = ()

    @property
    def emits(self) -> bool:
        """Whether the launch will emit tokens.  A chunk in which no prompt ends emits none."""
        return isinstance(self.step, steps.RunRound) or any(part.is_last for part in self.step.parts)


class Scheduler:
    """Holds waiting and running requests, and plans one launch after the other.

    rows: the most requests that hold rows at once.
    pads_rows: whether a round's rows are padded to a power of two, as CUDA graphs need it.
    sharing: decides which rows read common pages together; None: rows never do.
    """

    def __init__(
        self,
        admission: Admission,
        budget: ChunkBudget,
        speculation: Speculation,
        rows: int,
        pads_rows: bool,
        sharing: RowSharing | None = None,
    ) -> None:
        self.admission, self.budget, self.speculation, self.sharing = admission, budget, speculation, sharing
        self.rows, self.pads_rows = rows, pads_rows
        self.waiting: deque[Request] = deque()
        self.seats: list[Seat] = []
        self.totals = Totals()
        self.on_end: Callable[[Request], None] = lambda request: None  # told of every request that has ended, within a step
        # What the runner has not been told yet about rows that ended.  _moved: target row -> the row where the runner still has
        # what now belongs in the target.  _cleared: rows that have become free.
        self._moved: dict[int, int] = {}
        self._cleared: set[int] = set()
        self._chunk_is_next = True
        self._arrivals = count()
        self._batch_needs = BatchNeeds()

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.seats)

    def totals_now(self) -> Totals:
        """The totals, with what the scheduler holds now."""
        admission = self.admission
        pages, local = admission.pool.capacity, admission.local.capacity if admission.local else 0
        return replace(
            self.totals,
            running=len(self.seats),
            waiting=len(self.waiting),
            pages_used=pages - admission.free_pages,
            pages_total=pages,
            local_pages_used=local - admission.free_local_pages,
            local_pages_total=local,
        )

    # ---- requests come and go ----

    def add(self, request: Request) -> None:
        """Queues a request that passed `admission.check`."""
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Ends a request early, wherever it is, and frees its place.  A finished request stays as it is."""
        if request.is_done:
            return
        request.cancelled = True
        if seat := next((seat for seat in self.seats if seat.request is request), None):
            self._leave(seat)
        else:
            self.waiting.remove(request)
            self._ended(request)

    def fail(self, seats: list[Seat | None], error: BaseException) -> None:
        """Ends the requests of these seats with that error, except those that have ended already."""
        for seat in seats:
            if seat is not None and not seat.request.is_done:
                seat.request.error = error
                self._leave(seat)

    def fail_all(self, error: BaseException) -> None:
        """Ends all requests that hold rows with that error, and turns all rows into padding.

        It does not matter which of the earlier changes of rows the runner has been told.  An interrupt may have come just after
        a request's last token, while its text was made: that request fails too.
        """
        for seat in list(self.seats):
            if not seat.request.cancelled and seat.request.error is None:
                seat.request.error = error
            self._leave(seat)
        self._moved, self._cleared = {}, set(range(self.rows))

    def fail_waiting(self, error: BaseException) -> None:
        """Ends all requests that wait with that error."""
        while self.waiting:
            request = self.waiting.popleft()
            request.error = error
            self._ended(request)

    def departures(self) -> steps.LeaveRows | None:
        """The step that tells the runner which rows have ended; it must run before any other.  None: no row has."""
        if not self._cleared:
            return None
        return steps.LeaveRows(tuple((source, target) for target, source in self._moved.items()), tuple(sorted(self._cleared)))

    def departed(self) -> None:
        """The runner has been told of all departures."""
        self._moved, self._cleared = {}, set()

    # ---- what runs next ----

    def admit(self) -> steps.EnterRows | None:
        """Gives free rows and pages to waiting requests, in the order of arrival.  None: no request could enter.

        A request that had better wait for another one's prompt is passed over.
        """
        entries: list[steps.RowEntry] = []
        for request in list(self.waiting):
            if self._is_too_long(len(request.prompt_ids)):
                request.drafted_until = 0
            speculates = self._speculates(request)
            found = self.admission.find(request, speculates) if len(self.seats) < self.rows else None
            if found is None:
                break
            entering = [seat.request for seat in self.seats if not seat.runs]
            if speculates:  # the pages of the others will lack the drafter's keys and values
                entering = [other for other in entering if self._speculates(other)]
            if entering and self.admission.should_wait(request, found, entering):
                continue  # later requests need not wait with it
            if not self.admission.admit(request, found):
                break
            self.waiting.remove(request)
            self.totals.entered(request)
            allocation = self.admission.allocations[request]
            options, rules, _, grammar = request.choice
            encoder_input = self._encoder_input(request)
            entries.append(
                steps.RowEntry(len(self.seats), allocation.tables, options, speculates, rules, encoder_input, grammar)
            )
            self.seats.append(Seat(request, allocation.start, next(self._arrivals)))
            self._rows_changed()
        return steps.EnterRows(tuple(entries)) if entries else None

    def next(self) -> Launch | None:
        """The next chunk or round; the two take turns while both are possible.  None: there is nothing to launch."""
        entering = any(not seat.runs for seat in self.seats)
        running = sum(seat.runs and seat.tokens_left > 0 for seat in self.seats)
        if entering and (self._chunk_is_next or not running):
            self._chunk_is_next = False
            return self._next_chunk(running)
        self._chunk_is_next = True
        return self._next_round() if running else None

    def launched(self, launch: Launch) -> None:
        """Records that the runner has taken the launch: from now on other requests can share the pages of its prompts."""
        if isinstance(launch.step, steps.RunChunk):
            for part, seat in zip(launch.step.parts, launch.seats, strict=True):
                if seat is not None:
                    request = seat.request
                    self.admission.keep(request, request.prompt_ids[: part.end + 1], self._speculates(request), part.end)

    def make_ready(self, sizes: Sequence[int]) -> list[steps.Step]:
        """The steps that capture what rounds of so many rows may need; none given: of any number.  To be run while idle."""
        assert not self.seats
        return self.speculation.make_ready(sizes or self.sizes())

    def sizes(self) -> list[int]:
        """All numbers of rows that rounds may compute."""
        return sorted({self._padded(rows + 1) for rows in range(self.rows)})

    def take(self, launch: Launch, emitted: list[steps.Emitted], ended: Sequence[int], seconds: float | None) -> None:
        """Hands a launch's tokens to its requests.  Requests that have ended since the launch take none.

        ended: see Pending.  seconds: what a timed round took; None if the launch was not timed.
        """
        step = launch.step
        self.totals.rounds += isinstance(step, steps.RunRound)
        self.totals.chunks += isinstance(step, steps.RunChunk)
        if isinstance(step, steps.RunRound) and seconds is not None:
            drafting = [row for row, speculates in zip(emitted, launch.speculates, strict=False) if speculates]
            accepted, best = [len(row.tokens) - 1 for row in drafting], [row.best for row in drafting]
            self.speculation.observe(step, seconds, accepted, best, _tokens(launch.seats))
        for index in ended:
            if (seat := launch.seats[index]) is not None:
                seat.request.drafted_until = max(0, _tokens([seat]) - self.speculation.pause)
        for index, (seat, row) in enumerate(zip(launch.seats, emitted, strict=False)):  # a round's padding comes last
            if seat is None or not row.tokens:
                continue
            seat.unread -= 1
            if not seat.request.is_done:
                tree = None
                if isinstance(step, steps.RunRound):
                    tree = (step.drafted, step.depths) if launch.speculates[index] else (0, 0)
                self._hand_out(seat, row, tree)

    def _next_chunk(self, running: int) -> Launch:
        entering = [(row, seat) for row, seat in enumerate(self.seats) if not seat.runs]
        entering.sort(key=lambda row_seat: row_seat[1].arrival)  # not in the order of rows, because rows move when others leave
        shares = self.budget.share([seat.left for _, seat in entering], running)
        parts: list[steps.PromptPart] = []
        seats: list[Seat | None] = []
        for (row, seat), tokens in zip(entering, shares, strict=True):
            if not tokens:
                continue
            prompt, end = seat.request.prompt_ids, seat.done + tokens
            next_token = prompt[end] if end < len(prompt) else -1
            encoder_input = None if seat.done else self._encoder_input(seat.request)
            parts.append(steps.PromptPart(row, prompt[seat.done : end], seat.done, next_token, encoder_input))
            seats.append(seat)
            seat.done = end
            if next_token < 0:
                seat.runs, seat.unread = True, 1
                self._rows_changed()
        ending = [seat.request for seat in seats if seat is not None and seat.runs]
        cost = sum(self.budget.cost(part.start, len(part.token_ids)) for part in parts)
        cost += sum(self.budget.cost(0, len(part.encoder_input.token_ids)) for part in parts if part.encoder_input)
        may_capture = not running or cost <= self.budget.beside_rounds / CAPTURE_SHARE
        drafted = any(self._speculates(seat.request) for seat in seats if seat is not None)
        return Launch([], steps.RunChunk(tuple(parts), self._needs(ending), drafted, cost, may_capture), seats)

    def _next_round(self) -> Launch:
        seats = [seat if seat.runs else None for seat in self.seats]
        while seats[-1] is None:  # rows after the last running one need not be computed
            seats.pop()
        rows = self._padded(len(seats))
        before: list[steps.Step] = self._stop_drafting(seats)
        running = [seat.request for seat in seats if seat is not None]
        speculates = tuple(seat is not None and self._speculates(seat.request) for seat in seats)
        speculating = sum(speculates)
        if self.sharing is not None and self.sharing.group is None:
            # A page that is read for many rows at once reaches all of them if it holds NaN.  So while the drafter runs, rows
            # share no page that it has not written, although only rows that do not speculate would read that page.
            pages = [self.admission.fixed_pages(seat.request, speculating > 0) if seat else [] for seat in seats]
            if share := self.sharing.choose(pages):
                before.append(share)
        shared = bool(self.sharing and self.sharing.shares)
        first, step = self.speculation.next_round(
            rows, self._needs(running), shared, speculating / len(running), _tokens(seats) if self.speculation.controller else 0
        )
        before += first
        for seat in seats:
            if seat is not None:
                seat.unread += 1
        return Launch(before, step, seats, speculates)

    def _padded(self, rows: int) -> int:
        """How many rows a round computes for so many running ones."""
        return min(self.rows, 1 << (rows - 1).bit_length()) if self.pads_rows else rows

    def _stop_drafting(self, seats: list[Seat | None]) -> list[steps.Step]:
        """The step by which rows whose texts have become too long for the drafter go on plainly, if there are any."""
        rows = []
        for row, seat in enumerate(seats):
            if seat is not None and self._speculates(seat.request) and self._is_too_long(length := _tokens([seat])):
                seat.request.drafted_until = length - self.speculation.pause
                rows.append(row)
        self._end_pause()
        return [steps.StopDrafting(tuple(rows))] if rows else []

    def _is_too_long(self, tokens: int) -> bool:
        """Whether nothing is drafted in a text of so many tokens."""
        most = self.speculation.most_tokens
        return most is not None and tokens >= most

    def _end_pause(self) -> None:
        """Forgets the pause if no running row speculates: then no token is left that the drafter has not seen."""
        if not any(seat.runs and self._speculates(seat.request) for seat in self.seats):
            self.speculation.pause = 0

    def _needs(self, requests: list[Request]) -> steps.Needs:
        """What a batch of these requests needs to choose its tokens."""
        return self._batch_needs.of(request.choice.needs for request in requests)

    def _encoder_input(self, request: Request) -> steps.EncoderInput | None:
        """What the target's encoder reads for an admitted request, and where it is kept; None without an encoder."""
        if request.encoder_ids is None:
            return None
        page = self.admission.allocations[request].encoder_page
        assert page is not None
        return steps.EncoderInput(page, request.encoder_ids)

    def _speculates(self, request: Request) -> bool:
        """Whether draft tokens may be accepted for the request, so that the drafter must know its text."""
        return request.speculate and bool(self.speculation.shapes) and request.drafted_until is None

    # ---- endings ----

    def _hand_out(self, seat: Seat, emitted: steps.Emitted, tree: tuple[int, int] | None) -> None:
        """Gives a request its tokens.  If that fails, because of its tokenizer for example, only this request fails.

        tree: how many draft tokens and levels the round's tree had; None: the token is the first after the prompt.
        """
        request, before = seat.request, len(seat.request.output.token_ids)
        try:
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
            self._leave(seat)

    def _leave(self, seat: Seat) -> None:
        """Frees the request's pages and its row.  The last row moves into the gap, so that no free row lies between others."""
        row, last, request = self.seats.index(seat), len(self.seats) - 1, seat.request
        self.seats[row] = self.seats[last]
        self.seats.pop()
        source = self._moved.pop(last, last)
        if row != last:
            self._moved[row] = source
        self._cleared.add(last)
        if request.error is None:  # after an error nobody knows which keys and values were written
            written = request.prompt_ids + request.output.token_ids if seat.runs else request.prompt_ids[: seat.done + 1]
            speculates = self._speculates(request)
            unseen = self.speculation.pause if speculates else 0  # tokens at the end that the drafter may not have seen
            reach = len(written) + self.admission.lookahead * max(1, seat.unread)  # what launches in flight may write
            if request.drafted_until:  # later pages lack the drafter's keys and values
                written, speculates = written[: request.drafted_until], True
            self.admission.keep(request, written[: max(0, len(written) - unseen)], speculates, reach)
        self.admission.leave(request)
        self._ended(request)
        self._rows_changed()
        self._end_pause()
        if not self.seats:
            self._chunk_is_next = True

    def _ended(self, request: Request) -> None:
        self.totals.ended(request)
        self.on_end(request)

    def _rows_changed(self) -> None:
        if self.sharing is not None:
            self.sharing.forget()


def _tokens(seats: Sequence[Seat | None]) -> int:
    """Tokens of all rows together, prompts included, as far as they were handed out."""
    requests = [seat.request for seat in seats if seat is not None]
    return sum(len(request.prompt_ids) + len(request.output.token_ids) for request in requests)
