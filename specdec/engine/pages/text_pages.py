"""The one place where requests get pages for rows and give them back.

A request gets the pages of its text and of look-ahead when it takes a row, and more as its text grows.  This module knows
requests and their states.  Which pages are free and which are kept for later prompts is the matter of `Admission`; who gets a
row and who steps back is that of the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import inf

from specdec.engine.pages.admission import Admission
from specdec.engine.request import RequestState
from specdec.limits import ZEROS
from specdec.steps import PromptPart, RowEntry, RowGrowth

# A row gets pages for so many more tokens than the next round can reach, where that is a small part of the free ones.  So only
# few rounds come after a change of page tables.
AHEAD, FREE_SHARE = 256, 4


class EntryDecision(Enum):
    """Whether a request may enter.  WAITS: it had better wait for another one's prompt; those after it need not."""

    ENTERS, WAITS, NO_ROOM = range(3)


class TextPages:
    """Gives pages to the requests that hold rows, and takes them back.

    most: tokens that a round may emit in one row.
    """

    def __init__(self, admission: Admission, most: int) -> None:
        self.admission, self.most = admission, most
        self._sure = 0.0  # rounds that may be launched before any row can lack pages

    # ---- requests enter and leave ----

    def enter(self, state: RequestState, speculates: bool, entering: Sequence[RequestState]) -> EntryDecision:
        """Gives a request that waits its pages, if it may enter.

        speculates: whether it needs the drafter's keys and values.  entering: whose prompts it may have pages of once they have
        run.
        """
        request, admission = state.request, self.admission
        found = admission.find(request, speculates)
        if found is None:
            return EntryDecision.NO_ROOM
        if entering and admission.should_wait(request, found, entering):
            return EntryDecision.WAITS
        if not (admission.foresees_room(request, found) and admission.admit(request, found)):
            return EntryDecision.NO_ROOM
        state.begin(admission.allocations[request].start)
        return EntryDecision.ENTERS

    def entry(self, state: RequestState, row: int, speculates: bool) -> RowEntry:
        """How a request that has got its pages takes the row."""
        request = state.request
        options, rules, _, grammar = request.choice
        tables = tuple(map(tuple, self.admission.allocations[request].tables))  # a copy, because tables grow
        encoder_input = self.admission.encoder_input(request)
        predicted, sources = (request.prediction_ids, request.source_bits) if speculates else (None, None)
        written = tuple(request.output.token_ids[:-1]) if rules or grammar or predicted else ()
        number = self.admission.text_states.number(request) if self.admission.text_states else ZEROS
        waits = None if request.waits is None else request.waits.led(written)
        other = rules, encoder_input, grammar, written, number, predicted, sources, request.scope, waits
        return RowEntry(row, tables, options, speculates, *other)

    def next_part(self, state: RequestState, row: int, tokens: int) -> PromptPart:
        """Plans a chunk's part of the request's text, see RequestState.next_part."""
        admission, request, start = self.admission, state.request, state.done
        keep = admission.text_states.promise(request, state.text, start, start + tokens) if admission.text_states else None
        return state.next_part(row, tokens, None if start else admission.encoder_input(request), keep)

    def ran(self, state: RequestState, part: PromptPart, drafted: bool) -> None:
        """A part of the text is on its way, so other requests can share its pages.  drafted: whether the drafter reads it."""
        end = part.end
        tokens = [*state.text, state.next_token] if state.resumes and part.is_last else state.text[: end + 1]
        self.admission.keep(state.request, tokens, drafted, end)
        if self.admission.text_states is not None:
            self.admission.text_states.ran(state.request, tokens, drafted)

    def leave(self, state: RequestState, drafted: bool, unseen: int) -> None:
        """Takes all pages of a row that ends or steps back.  The prefix cache keeps those that are full and final.

        drafted: whether the drafter goes on with the text; it may not have seen the last `unseen` tokens.
        """
        request = state.request
        if request.error is None:  # after an error nobody knows which keys and values were written
            written = request.prompt_ids + request.output.token_ids if state.runs else state.text[: state.done + 1]
            reach = len(written) + self.admission.lookahead * max(1, state.unread)  # what launches in flight may write
            if request.drafted_until:  # later pages lack the drafter's keys and values
                written, drafted = written[: request.drafted_until], True
            self.admission.keep(request, written[: max(0, len(written) - unseen)], drafted, reach, leaves=True)
        self.admission.leave(request)

    # ---- rows grow ----

    def look_again(self) -> None:
        """Rows have entered, left or begun to run."""
        self._sure = 0.0

    @property
    def are_sure(self) -> bool:
        """Whether no row can lack pages in the next round."""
        return self._sure >= 1

    def launched_round(self) -> None:
        """One more round is on its way."""
        self._sure -= 1

    def reach(self, state: RequestState) -> int:
        """The tokens for which a row needs pages in the next round.

        Each launch that the host has not read may have moved the row by `most` tokens; look-ahead counts one of them.
        """
        return state.request.num_tokens + self.admission.lookahead + (state.unread - 1) * self.most

    def are_short(self, running: Sequence[RequestState]) -> bool:
        """Whether there are fewer free pages than these rows lack for the next round."""
        lacking = sum(self.admission.pages_lacking(state.request, self.reach(state)) for state in running)
        return lacking > self.admission.free_pages

    def grow(self, running: Sequence[tuple[int, RequestState]]) -> list[RowGrowth]:
        """Gives running rows, which are not short, what they lack, and some more where there is much."""
        admission, allocations, size = self.admission, self.admission.allocations, self.admission.pool.page_size
        reached = [self.reach(state) for _, state in running]
        wanted = sum(admission.pages_lacking(state.request, n + AHEAD) for (_, state), n in zip(running, reached, strict=True))
        ahead = AHEAD if wanted * FREE_SHARE <= admission.free_pages else 0
        growths, self._sure = [], inf
        for (row, state), reach in zip(running, reached, strict=True):
            held = allocations[state.request]
            first = len(held.table)
            if admission.entries_lacking(state.request, reach + ahead):
                growths.append(RowGrowth(row, first, admission.grow(state.request, reach + ahead)))
            if len(held.table) < held.most:
                self._sure = min(self._sure, (len(held.table) * size - reach) // self.most + 1)
        return growths
