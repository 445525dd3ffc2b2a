"""The endpoints: what each path answers.  Errors are raised as ApiError."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import ExitStack
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from specdec.serve.generate import make_requests, run_all
from specdec.serve.metrics import registry_of
from specdec.serve.middleware import ENTRY
from specdec.serve.state import ServerState
from specdec.serve.stream import EventStream
from specdec.serve.wire.answers import AnswerHeading, model_card, whole_answer
from specdec.serve.wire.body import parse_object, read_body
from specdec.serve.wire.corpus import corpus_answer, read_corpus_plan
from specdec.serve.wire.errors import wrong
from specdec.serve.wire.fields import CHAT, COMPLETIONS
from specdec.serve.wire.requests import read_plan, unknown_model

ReadMetrics = Callable[[], Awaitable[bytes]]  # gives the page of /metrics
SetCorpus = Callable[[str, Sequence[str]], Coroutine[Any, Any, int]]  # see SpecDecoder.set_corpus


class Endpoints:
    """The methods are what the paths answer."""

    def __init__(self, state: ServerState, read_metrics: ReadMetrics | None, set_corpus: SetCorpus | None) -> None:
        self._state = state
        self._registry: CollectorRegistry = registry_of(lambda: state.decoder.totals, state.counts)
        self._read_metrics = read_metrics or self._own_metrics
        self._set_corpus = set_corpus or self._own_corpus

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, COMPLETIONS)

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, CHAT)

    async def corpus(self, request: Request) -> Response:
        """Adds or replaces texts of which drafts are made.  They are encoded on another thread than the event loop's."""
        state = self._state
        state.check_open()
        body = await read_body(request.receive, request.headers, state.options.max_body_bytes, state.options.read_seconds)
        name, texts = read_corpus_plan(parse_object(body))
        try:
            tokens = await state.unless_gone(self._set_corpus(name, texts), request.receive)
        except (TypeError, ValueError) as error:
            raise wrong("text", str(error)) from None
        return JSONResponse(corpus_answer(name, len(texts), tokens))

    async def _own_corpus(self, name: str, texts: Sequence[str]) -> int:
        return await self._state.decoder.prepared(lambda decoder: decoder.set_corpus(name, texts))

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._state.options.name:
            raise unknown_model(name, self._state.options.name)
        return JSONResponse(self._card())

    async def health(self, request: Request) -> Response:
        """Whether the process should go on: 503 once the engine has failed for good."""
        failure = self._state.decoder.failure
        if failure is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "failed", "reason": str(failure)}, 503)

    async def ready(self, request: Request) -> Response:
        """Whether requests should be sent here."""
        self._state.check_open()
        return JSONResponse({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        return Response(await self._read_metrics(), media_type=CONTENT_TYPE_LATEST)

    async def _own_metrics(self) -> bytes:
        return generate_latest(self._registry)

    def _card(self) -> dict[str, object]:
        state = self._state
        return model_card(state.options.name, state.created, state.max_seq_len)

    async def _generate(self, request: Request, path: str) -> Response:
        """Everything is checked before the status is sent, so a stream never fails for what it was given."""
        state, entry = self._state, request.scope[ENTRY]
        state.check_open()
        options = state.options
        body = await read_body(request.receive, request.headers, options.max_body_bytes, options.read_seconds)
        plan = read_plan(parse_object(body), path, state.options.name, state.options.max_tokens_cap)
        entry.plan(plan, state.options.log_prompts)
        heading = AnswerHeading(("chatcmpl-" if plan.is_chat else "cmpl-") + entry.id.removeprefix("req-"), state.options.name)
        with ExitStack() as held:
            state.check_open()  # again: the body may have taken its time
            queued = held.enter_context(state.queue.enter(plan.choices, "n" if plan.n > 1 else plan.prompt_field))
            making = make_requests(state.decoder, plan, state.options.max_tokens_cap)
            queued.requests = await state.unless_gone(making, request.receive)
            if plan.stream:
                return EventStream(state, plan, queued.requests, heading, held.pop_all(), entry)
            generations = await state.unless_gone(run_all(state.decoder, queued.requests), request.receive)
        entry.finished(plan, generations, state.options.log_prompts)
        return JSONResponse(whole_answer(heading, plan, generations, state.piece))
