"""Answers /v1/responses: as a chat, whose plan, requests and streams are those of /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from specdec.chat.reply import reply_of
from specdec.generation import Generation
from specdec.serve.middleware import ENTRY
from specdec.serve.responses.output import ResponseHeading, items_of, status_of
from specdec.serve.responses.request import CALLED, chat_body
from specdec.serve.responses.stream import ResponseWriter
from specdec.serve.responses.tools import namespaces_of
from specdec.serve.running.answer import answer_plan
from specdec.serve.running.generate import MadeRequests
from specdec.serve.state import ServerState
from specdec.serve.wire.errors import ApiError
from specdec.serve.wire.fields import CHAT
from specdec.serve.wire.logprobs import Piece, chat_logprobs
from specdec.serve.wire.requests import RequestPlan, read_plan


async def answer_response(state: ServerState, request: Request) -> Response:
    """The response to a request.  Errors name the fields of this endpoint."""
    options, count = state.options, state.decoder.decoder.tokenizer.encode_plain

    def read(body: dict[str, Any]) -> tuple[dict[str, Any], RequestPlan]:
        chat, left_out = chat_body(body, options.lenient)
        with _own_names():
            plan = read_plan(chat, CHAT, options.name, options.max_tokens_cap, options.max_logprobs)
        return body, replace(plan, prompt_field="input", left_out=left_out)

    body, plan = await state.read(request, read)
    with _own_names():
        name = "resp_" + request.scope[ENTRY].id.removeprefix("req-")
        heading = ResponseHeading(name, options.name, int(time.time()), body, lambda text: len(count(text)))
        return await answer_plan(state, request, plan, _Response(heading, plan, state.piece))


@contextmanager
def _own_names() -> Iterator[None]:
    """Gives errors about the chat the names of this endpoint's fields."""
    try:
        yield
    except ApiError as error:
        error.rename(CALLED)
        error.message = error.message.replace("].function.", "].")
        error.param = error.param and error.param.replace("].function.", "].")
        raise


@dataclass(frozen=True)
class _Response:
    """What a response looks like."""

    heading: ResponseHeading
    plan: RequestPlan
    piece: Piece

    def writer(self, made: MadeRequests) -> ResponseWriter:
        return ResponseWriter(self.heading, self.plan, self.piece, made.reader() if made.reader else None)

    def whole(self, made: MadeRequests, generations: Sequence[Generation]) -> dict[str, Any]:
        (generation,) = generations
        logprobs = chat_logprobs(generation.logprobs, self.piece)["content"] if generation.logprobs else []
        reply, spaces = reply_of(made.reader, generation.text), namespaces_of(self.heading.body.get("tools"))
        items = items_of(reply, status_of(generation), logprobs, spaces, self.heading.carries_thoughts)
        return self.heading.finished(self.plan, generation, items)
