"""The endpoints: what each path answers.  Errors are raised as ApiError."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import ExitStack

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from specdec.serve.door import Door
from specdec.serve.gate import ENTRY
from specdec.serve.generate import make_requests, run_all
from specdec.serve.metrics import registry_of
from specdec.serve.stream import EventStream
from specdec.serve.wire.answers import AnswerHeading, model_card, whole_answer
from specdec.serve.wire.body import parse_object, read_body
from specdec.serve.wire.fields import CHAT, COMPLETIONS
from specdec.serve.wire.requests import read_plan, unknown_model

ReadMetrics = Callable[[], Awaitable[bytes]]  # gives the page of /metrics


class Endpoints:
    """The methods are what the paths answer."""

    def __init__(self, door: Door, read_metrics: ReadMetrics | None) -> None:
        self._door = door
        self._registry: CollectorRegistry = registry_of(lambda: door.decoder.totals, door.counts)
        self._read_metrics = read_metrics or self._own_metrics

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, COMPLETIONS)

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, CHAT)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._door.options.name:
            raise unknown_model(name, self._door.options.name)
        return JSONResponse(self._card())

    async def health(self, request: Request) -> Response:
        """Whether the process should go on: 503 once the engine has failed for good."""
        failure = self._door.decoder.failure
        if failure is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "failed", "reason": str(failure)}, 503)

    async def ready(self, request: Request) -> Response:
        """Whether requests should be sent here."""
        self._door.check_open()
        return JSONResponse({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        return Response(await self._read_metrics(), media_type=CONTENT_TYPE_LATEST)

    async def _own_metrics(self) -> bytes:
        return generate_latest(self._registry)

    def _card(self) -> dict[str, object]:
        door = self._door
        return model_card(door.options.name, door.created, door.max_seq_len)

    async def _generate(self, request: Request, path: str) -> Response:
        """Everything is checked before the status is sent, so a stream never fails for what it was given."""
        door, entry = self._door, request.scope[ENTRY]
        door.check_open()
        options = door.options
        body = await read_body(request.receive, request.headers, options.max_body_bytes, options.read_seconds)
        plan = read_plan(parse_object(body), path, door.options.name, door.options.max_tokens_cap)
        entry.plan(plan, door.options.log_prompts)
        heading = AnswerHeading(("chatcmpl-" if plan.is_chat else "cmpl-") + entry.id.removeprefix("req-"), door.options.name)
        with ExitStack() as held:
            door.check_open()  # again: the body may have taken its time
            queued = held.enter_context(door.queue.enter(plan.choices, "n" if plan.n > 1 else plan.prompt_field))
            making = make_requests(door.decoder, plan, door.options.max_tokens_cap)
            queued.requests = await door.unless_gone(making, request.receive)
            if plan.stream:
                return EventStream(door, plan, queued.requests, heading, held.pop_all(), entry)
            generations = await door.unless_gone(run_all(door.decoder, queued.requests), request.receive)
        entry.finished(plan, generations, door.options.log_prompts)
        return JSONResponse(whole_answer(heading, plan, generations, door.piece))
