"""Bodies that hold as much as a body may: they keep nobody else waiting."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from types import FrameType
from typing import Any

import pytest
from starlette.requests import Request
from toolkit.serving.server import Served, error_of

from specdec import SpecDecoder
from specdec.async_decoder import AsyncSpecDecoder
from specdec.checks import require_ids
from specdec.serve.options import ServeOptions
from specdec.serve.state import LARGE_BODY, ServerState
from specdec.serve.wire.fields import CHAT


def request_of(body: bytes) -> Request:
    """A request whose caller sends the body, and then waits."""
    messages = [{"type": "http.request", "body": body}]

    async def receive() -> dict[str, Any]:
        return messages.pop() if messages else await asyncio.Event().wait() or {}

    return Request({"type": "http", "headers": [(b"content-type", b"application/json")]}, receive)


def test_large_bodies_are_read_beside_the_event_loop(pair: SpecDecoder) -> None:
    """Keeps out: a list of a million entries that stops every other stream while it is checked."""

    async def readers() -> list[threading.Thread]:
        state = ServerState(AsyncSpecDecoder(pair), ServeOptions())
        small, large = json.dumps({"tokens": []}).encode(), json.dumps({"tokens": [5] * LARGE_BODY}).encode()
        return [await state.read(request_of(body), lambda _: threading.current_thread()) for body in (small, large)]

    here, elsewhere = asyncio.run(readers())
    assert here is threading.main_thread() and elsewhere is not here


def test_errors_of_large_bodies_are_those_of_small_ones(served: Served) -> None:
    """Keeps out: a status of 500, or an error without its field, because another thread has read the body."""
    ids = [5] * LARGE_BODY
    for path, more, param in (
        ("/detokenize", {"tokens": [*ids, 2048]}, "tokens"),
        ("/v1/completions", {"prompt": "Once", "stop_token_ids": [*ids, -1]}, "stop_token_ids"),
        ("/v1/completions", {"prompt": "Once", "stop_token_ids": [*ids, True]}, "stop_token_ids"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * LARGE_BODY}], "top_p": 7}, "top_p"),
    ):
        assert error_of(served.post(path, more), 400)["param"] == param
    deep = '{"prompt": ' + "[" * LARGE_BODY + "]" * LARGE_BODY + "}"
    assert "nested too deeply" in error_of(served.post("/v1/completions", deep.encode()), 400)["message"]


def test_ids_are_checked_together() -> None:
    """Counts Python's calls.  Keeps out: a call for each of a million ids; one wrong id that is overlooked, or not named."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before, many = sys.getprofile(), [5] * 10_000
    sys.setprofile(count)
    try:
        kept = require_ids("tokens", many)
    finally:
        sys.setprofile(before)
    assert kept == tuple(many) and calls < 100
    for wrong, error in ((True, TypeError), (1.0, TypeError), (-1, ValueError), (2**31, ValueError)):
        with pytest.raises(error, match="10000"):
            require_ids("tokens", [*many, wrong])
