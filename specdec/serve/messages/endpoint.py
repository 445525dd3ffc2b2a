"""Answers /v1/messages, as a chat, whose plan, requests and streams are those of /v1/chat/completions, and counts tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from specdec.chat.reply import reply_of
from specdec.decoder import SpecDecoder
from specdec.generation import Generation
from specdec.serve.messages.output import MessageHeading, blocks_of, ended_by
from specdec.serve.messages.request import CALLED, chat_body
from specdec.serve.messages.stream import MessageWriter
from specdec.serve.middleware import ENTRY
from specdec.serve.options import ServeOptions
from specdec.serve.running.answer import answer_plan, told
from specdec.serve.running.generate import MadeRequests
from specdec.serve.state import ServerState
from specdec.serve.tokens.endpoints import encoded
from specdec.serve.wire.errors import ApiError
from specdec.serve.wire.fields import CHAT
from specdec.serve.wire.requests import RequestPlan, read_plan


async def answer_message(state: ServerState, request: Request) -> Response:
    """The message that answers a request.  Errors name the fields of this endpoint."""
    plan = await state.read(request, lambda body: _plan(state.options, body))
    with _own_names():
        name = "msg_" + request.scope[ENTRY].id.removeprefix("req-")
        count = state.decoder.decoder.tokenizer.encode_plain
        heading = MessageHeading(name, state.options.name, lambda text: len(count(text)))
        return await answer_plan(state, request, plan, _Message(heading, plan))


async def answer_count(state: ServerState, request: Request) -> Response:
    """How many tokens a message's prompt would have."""
    plan = await state.read(request, lambda body: _plan(state.options, body, counts=True))
    request.scope[ENTRY].plan(plan, state.options.log_prompts)

    def work(decoder: SpecDecoder) -> list[int]:
        return decoder.encode(plan.prompt(0, decoder.tokenizer.template_variables), "messages")

    return told(plan, JSONResponse({"input_tokens": len(await encoded(state, request, work, "messages"))}))


def _plan(options: ServeOptions, body: dict[str, Any], counts: bool = False) -> RequestPlan:
    asked = chat_body(body, options.lenient, counts)
    with _own_names():
        plan = read_plan(asked.body, CHAT, options.name, options.max_tokens_cap, options.max_logprobs)
    return replace(plan, thinks=asked.thinks, left_out=asked.left_out)


@contextmanager
def _own_names() -> Iterator[None]:
    """Gives errors about the chat the names of this endpoint's fields."""
    try:
        yield
    except ApiError as error:
        error.rename(CALLED)
        error.message = error.message.replace(".function.parameters", ".input_schema").replace("].function.", "].")
        raise


@dataclass(frozen=True)
class _Message:
    """What a message looks like."""

    heading: MessageHeading
    plan: RequestPlan

    def writer(self, made: MadeRequests) -> MessageWriter:
        return MessageWriter(self.heading, self.plan, made.requests[0], made.reader() if made.reader else None)

    def whole(self, made: MadeRequests, generations: Sequence[Generation]) -> dict[str, Any]:
        (generation,) = generations
        reply = reply_of(made.reader, generation.text)
        used = self.heading.used(self.plan, generation, reply.thought or "")
        return self.heading.message(blocks_of(reply), ended_by(generation, bool(reply.calls)), used)
