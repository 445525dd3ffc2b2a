"""Answers /v1/responses: as a chat, whose plan, requests and streams are those of /v1/chat/completions."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from specdec.chat.reply import Reply, read_reply
from specdec.serve.generate import make_requests, run_all
from specdec.serve.middleware import ENTRY
from specdec.serve.responses.output import ResponseHeading, items_of, status_of
from specdec.serve.responses.request import chat_body, rename
from specdec.serve.responses.stream import ResponseWriter
from specdec.serve.responses.tools import namespaces_of
from specdec.serve.state import ServerState
from specdec.serve.stream import EventStream
from specdec.serve.wire.errors import ApiError
from specdec.serve.wire.fields import CHAT
from specdec.serve.wire.logprobs import chat_logprobs
from specdec.serve.wire.requests import read_plan


async def answer_response(state: ServerState, request: Request, body: dict[str, Any]) -> Response:
    """The response to a body.  Errors name the fields of this endpoint."""
    chat = chat_body(body, state.options.lenient)
    try:
        return await _answer(state, request, body, chat)
    except ApiError as error:
        rename(error)
        raise


async def _answer(state: ServerState, request: Request, body: dict[str, Any], chat: dict[str, Any]) -> Response:
    """chat: the body of the chat that the response is."""
    entry, options = request.scope[ENTRY], state.options
    plan = read_plan(chat, CHAT, options.name, options.max_tokens_cap, options.max_logprobs)
    entry.plan(plan, options.log_prompts)
    count = state.decoder.decoder.tokenizer.encode_plain
    name = "resp_" + entry.id.removeprefix("req-")
    heading = ResponseHeading(name, options.name, int(time.time()), body, lambda text: len(count(text)))
    with ExitStack() as held:
        state.check_open()  # again: the body may have taken its time
        queued = held.enter_context(state.queue.enter(1, "input"))
        making = make_requests(state.decoder, replace(plan, prompt_field="input"), options.max_tokens_cap, state.form)
        made = await state.unless_gone(making, request.receive)
        queued.requests = made.requests
        if plan.stream:
            writer = ResponseWriter(heading, plan, state.piece, made.reader() if made.reader else None)
            return EventStream(state, plan, made.requests, writer, held.pop_all(), entry)
        generations = await state.unless_gone(run_all(state.decoder, made.requests), request.receive)
    entry.finished(plan, generations, options.log_prompts)
    (generation,) = generations
    reply = Reply(generation.text, None, ()) if made.reader is None else read_reply(made.reader(), generation.text)
    logprobs = chat_logprobs(generation.logprobs, state.piece)["content"] if generation.logprobs else []
    items = items_of(reply, status_of(generation), logprobs, namespaces_of(body.get("tools")))
    return JSONResponse(heading.finished(plan, generation, items))
