"""The endpoints: what each path answers.  Errors are raised as ApiError."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from specdec import __version__
from specdec.checks import shown
from specdec.decoder import SpecDecoder
from specdec.generation import Generation
from specdec.serve.chats.reply_stream import writer_of
from specdec.serve.messages.endpoint import answer_count, answer_message
from specdec.serve.metrics import registry_of
from specdec.serve.middleware import ENTRY
from specdec.serve.responses.endpoint import answer_response
from specdec.serve.running.answer import answer_plan
from specdec.serve.running.generate import MadeRequests, prompts_of
from specdec.serve.running.stream import EventWriter
from specdec.serve.state import ServerState
from specdec.serve.tokens.endpoints import answer_detokenize, answer_tokenize
from specdec.serve.wire import fields
from specdec.serve.wire.answers import AnswerHeading, model_card, whole_answer
from specdec.serve.wire.corpus import corpus_answer, read_corpus_plan
from specdec.serve.wire.errors import wrong
from specdec.serve.wire.fields import CHAT, COMPLETIONS
from specdec.serve.wire.prompts_said import ChoicePrompt
from specdec.serve.wire.requests import RequestPlan, read_plan, unknown_model

ReadMetrics = Callable[[], Awaitable[bytes]]  # gives the page of /metrics
SetCorpus = Callable[[str, Sequence[str]], Coroutine[Any, Any, int]]  # see SpecDecoder.set_corpus
SwitchDrafts = Callable[[bool | None], Coroutine[Any, Any, bool]]  # see `switch_drafts`


class Endpoints:
    """The methods are what the paths answer."""

    def __init__(
        self,
        state: ServerState,
        read_metrics: ReadMetrics | None,
        set_corpus: SetCorpus | None,
        switch: SwitchDrafts | None,
    ) -> None:
        self._state = state
        self._registry: CollectorRegistry = registry_of(lambda: state.decoder.totals, state.counts, state.options)
        self._read_metrics = read_metrics or self._own_metrics
        self._set_corpus = set_corpus or self._own_corpus
        self._switch = switch or self._own_drafts

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, COMPLETIONS)

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, CHAT)

    async def responses(self, request: Request) -> Response:
        return await answer_response(self._state, request)

    async def messages(self, request: Request) -> Response:
        return await answer_message(self._state, request)

    async def count_tokens(self, request: Request) -> Response:
        return await answer_count(self._state, request)

    async def corpus(self, request: Request) -> Response:
        """Adds or replaces texts of which drafts are made.  They are encoded on another thread than the event loop's."""
        state = self._state
        name, texts = await state.read(request, read_corpus_plan)
        try:
            tokens = await state.unless_gone(self._set_corpus(name, texts), request.receive)
        except (TypeError, ValueError) as error:
            raise wrong("text", str(error)) from None
        return JSONResponse(corpus_answer(name, len(texts), tokens))

    async def _own_corpus(self, name: str, texts: Sequence[str]) -> int:
        return await self._state.decoder.prepared(lambda decoder: decoder.set_corpus(name, texts))

    async def drafting(self, request: Request) -> Response:
        """Whether anything is drafted, and a switch for it: an audit may have turned it off (`audit_stop`)."""
        state, enabled = self._state, None
        if request.method == "POST":
            told = await state.read(request, lambda body: fields.only_used(body, ("enabled",), {}, ""))
            enabled = told.get("enabled")
            if not isinstance(enabled, bool):
                raise wrong(
                    "enabled",
                    f'enabled must be true or false, got {shown(enabled)}; nearest thing that works: {{"enabled": true}}',
                )
            if state.decoder.decoder.head is None:
                raise wrong("enabled", "there is no drafter here to switch; nearest thing that works: a server with --draft")
        return JSONResponse({"object": "drafting", "enabled": await self._switch(enabled)})

    async def _own_drafts(self, enabled: bool | None) -> bool:
        return await switch_drafts(self._state.decoder.decoder, enabled)

    async def tokenize(self, request: Request) -> Response:
        return await answer_tokenize(self._state, request)

    async def detokenize(self, request: Request) -> Response:
        return await answer_detokenize(self._state, request)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": __version__})

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
        state, options = self._state, self._state.options
        limits = options.max_tokens_cap, options.max_logprobs, options.lenient
        plan = await state.read(request, lambda body: read_plan(body, path, options.name, *limits))
        name = ("chatcmpl-" if plan.is_chat else "cmpl-") + request.scope[ENTRY].id.removeprefix("req-")
        return await answer_plan(state, request, plan, _Choices(state, plan, AnswerHeading(name, options.name)))


@dataclass(frozen=True)
class _Choices:
    """An answer in choices, of completions and chats."""

    state: ServerState
    plan: RequestPlan
    heading: AnswerHeading

    def writer(self, made: MadeRequests) -> EventWriter:
        return writer_of(self.heading, self.plan, self._prompts(made), self.state.piece, made.reader)

    def whole(self, made: MadeRequests, generations: Sequence[Generation]) -> dict[str, Any]:
        return whole_answer(self.heading, self.plan, generations, self._prompts(made), self.state.piece, made.reader)

    def _prompts(self, made: MadeRequests) -> list[ChoicePrompt]:
        return prompts_of(self.state.decoder.decoder, self.plan, made.requests)


async def switch_drafts(decoder: SpecDecoder, enabled: bool | None) -> bool:
    """Switches a decoder's drafts for all its callers; None leaves them as they are.  Returns whether it drafts."""
    if enabled is not None:
        decoder.set_drafting(enabled)
        await asyncio.to_thread(decoder.owner.settle)
    return decoder.is_drafting
