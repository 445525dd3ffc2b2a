"""Answers /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from specdec.decoder import SpecDecoder
from specdec.serve.running.generate import NO_TEMPLATE
from specdec.serve.state import ServerState
from specdec.serve.tokens.bodies import read_detokenize, read_tokenize_plan, tokenized
from specdec.serve.wire.errors import wrong
from specdec.serve.wire.requests import told_effort


async def answer_tokenize(state: ServerState, request: Request) -> Response:
    """The ids of a text or a chat, as a request with it would have them."""
    plan = await state.read(request, lambda body: read_tokenize_plan(body, state.options.name))
    name = "prompt" if isinstance(plan.prompt, str) else "messages"

    def work(decoder: SpecDecoder) -> list[int]:
        if plan.special or not isinstance(plan.prompt, str):
            return decoder.encode(told_effort(plan.prompt, plan.effort, decoder.tokenizer.template_variables), name)
        return decoder.tokenizer.encode_plain(plan.prompt)

    ids = await encoded(state, request, work, name)
    strings = [state.piece(token) for token in ids] if plan.strings else None
    return JSONResponse(tokenized(ids, state.max_seq_len, strings))


async def encoded(state: ServerState, request: Request, work: Callable[[SpecDecoder], list[int]], name: str) -> list[int]:
    """The ids that the work makes, on another thread than the event loop's.  name: of the field that holds the prompt."""
    try:
        return await state.unless_gone(state.decoder.prepared(work), request.receive)
    except (TypeError, ValueError) as error:
        tokenizer = state.decoder.decoder.tokenizer
        if name == "messages" and not tokenizer.has_chat_template:
            raise wrong(name, NO_TEMPLATE.format("/tokenize")) from None
        raise wrong(name, tokenizer.without_folder(str(error))) from None


async def answer_detokenize(state: ServerState, request: Request) -> Response:
    """The text of ids, without tokens that begin or end texts."""
    size = state.decoder.decoder.model.config.vocab_size
    ids = await state.read(request, lambda body: read_detokenize(body, state.options.name, size))
    if not ids:
        return JSONResponse({"prompt": ""})
    decoded = state.decoder.prepared(lambda decoder: decoder.tokenizer.decode(ids))  # a million of them take seconds
    return JSONResponse({"prompt": await state.unless_gone(decoded, request.receive)})
