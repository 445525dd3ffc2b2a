"""The answer to a plan, whole or as a stream: its place in the queue, its requests, and what the log says of it.

Every endpoint that writes texts goes this way.  What its answers look like it says by an AnswerForm.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from specdec.generation import Generation
from specdec.serve.middleware import ENTRY
from specdec.serve.running.generate import MadeRequests, make_requests, run_all
from specdec.serve.running.stream import EventStream, EventWriter
from specdec.serve.state import ServerState
from specdec.serve.wire.left_out import LEFT_OUT_HEADER, header_value
from specdec.serve.wire.requests import RequestPlan


class AnswerForm(Protocol):
    """What the answers of an endpoint look like."""

    def writer(self, made: MadeRequests) -> EventWriter:
        """Writes a stream's events."""
        ...

    def whole(self, made: MadeRequests, generations: Sequence[Generation]) -> dict[str, Any]:
        """The answer that is not streamed; generations are in the order of the choices."""
        ...


async def answer_plan(state: ServerState, request: Request, plan: RequestPlan, form: AnswerForm) -> Response:
    """Everything is checked before the status is sent, so a stream never fails for what it was given."""
    entry, options = request.scope[ENTRY], state.options
    entry.plan(plan, options.log_prompts)
    with ExitStack() as held:
        state.check_open()  # again: the body may have taken its time
        queued = held.enter_context(state.queue.enter(plan.choices, "n" if plan.n > 1 else plan.prompt_field))
        making = make_requests(state.decoder, plan, options.max_tokens_cap, state.form)
        made = await state.unless_gone(making, request.receive)
        queued.requests = made.requests
        if plan.stream:
            return told(plan, EventStream(state, plan, made.requests, form.writer(made), held.pop_all(), entry))
        generations = await state.unless_gone(run_all(state.decoder, made.requests), request.receive)
    entry.finished(plan, generations, options.log_prompts)
    return told(plan, JSONResponse(form.whole(made, generations)))


def told(plan: RequestPlan, answer: Response) -> Response:
    """The same with what was left out of the request."""
    if plan.left_out:
        answer.headers[LEFT_OUT_HEADER] = header_value(plan.left_out)
    return answer
