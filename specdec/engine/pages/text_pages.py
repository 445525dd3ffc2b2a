"""The one place where requests get pages for rows and give them back.

This module knows requests and their states.  Which pages are free and which are kept for later prompts is the matter of
`Admission`; who gets a row is that of the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from specdec.engine.pages.admission import Admission
from specdec.engine.request import RequestState
from specdec.steps import PromptPart


class Verdict(Enum):
    """Whether a request may enter.  WAITS: it had better wait for another one's prompt; those after it need not."""

    ENTERS, WAITS, NO_ROOM = range(3)


class TextPages:
    """Gives pages to the requests that hold rows, and takes them back."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission

    def enter(self, state: RequestState, speculates: bool, entering: Sequence[RequestState]) -> Verdict:
        """Gives a request that waits its pages, if it may enter.

        speculates: whether it needs the drafter's keys and values.  entering: whose prompts it may have pages of once they have
        run.
        """
        request = state.request
        found = self.admission.find(request, speculates)
        if found is None:
            return Verdict.NO_ROOM
        others = [other.request for other in entering]
        if others and self.admission.should_wait(request, found, others):
            return Verdict.WAITS
        if not self.admission.admit(request, found):
            return Verdict.NO_ROOM
        state.done = self.admission.allocations[request].start
        return Verdict.ENTERS

    def ran(self, state: RequestState, part: PromptPart, drafted: bool) -> None:
        """A part of the prompt is on its way, so other requests can share its pages.  drafted: whether the drafter reads it."""
        request = state.request
        self.admission.keep(request, request.prompt_ids[: part.end + 1], drafted, part.end)

    def leave(self, state: RequestState, drafted: bool, unseen: int) -> None:
        """Takes all pages of a row that ends.  The prefix cache keeps those that are full and final.

        drafted: whether the drafter goes on with the text; it may not have seen the last `unseen` tokens.
        """
        request = state.request
        if request.error is None:  # after an error nobody knows which keys and values were written
            written = request.prompt_ids + request.output.token_ids if state.runs else request.prompt_ids[: state.done + 1]
            reach = len(written) + self.admission.lookahead * max(1, state.unread)  # what launches in flight may write
            if request.drafted_until:  # later pages lack the drafter's keys and values
                written, drafted = written[: request.drafted_until], True
            self.admission.keep(request, written[: max(0, len(written) - unseen)], drafted, reach)
        self.admission.leave(request)
