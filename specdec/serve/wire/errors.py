"""Errors as OpenAI's API writes them: a status, and {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

MAX_MESSAGE_LENGTH = 1000  # a message may quote what the caller sent
INVALID, BUSY, SERVER = "invalid_request_error", "rate_limit_error", "server_error"  # values of "type"
REQUEST_FAILED = "request_failed"  # a "code"
RETRY_SECONDS = 1
DISCARD_BYTES = 64 << 20  # of a body that nobody reads, before its connection is closed


class ApiError(Exception):
    """What an endpoint raises to answer with an error.

    kind: OpenAI's "type".  param: the field that is wrong.  retry_after: seconds after which the caller may try again.
    leaves_body: whether the request's body has not been read to its end.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        leaves_body: bool = False,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.retry_after, self.leaves_body = retry_after, leaves_body
        self.message = message if len(message) <= MAX_MESSAGE_LENGTH else message[:MAX_MESSAGE_LENGTH] + "..."

    def rename(self, called: Mapping[str, str]) -> None:
        """Gives an error about a field the name of another endpoint.  called: what each field of a chat is called there."""
        param = self.param or ""
        for name, own in called.items():
            if param == name or param.startswith((f"{name}.", f"{name}[")):
                self.param, self.message = own + param.removeprefix(name), self.message.replace(name, own)
                return

    def as_json(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.leaves_body:
            headers["connection"] = "close"
        return headers


class ClientGone(Exception):
    """The caller closed the connection before it had its answer."""


class ErrorAnswer(JSONResponse):
    """The response to an ApiError.

    Where the request's body has not been read, the rest of it is read and thrown away after the answer was sent: closing the
    connection at once would make the caller's system throw the answer away.  discard_seconds: for that.
    body: the error in the form of an API.
    """

    def __init__(self, error: ApiError, body: dict[str, Any], discard_seconds: float) -> None:
        super().__init__(body, error.status, error.headers())
        self._leaves_body, self._discard_seconds = error.leaves_body, discard_seconds

    def render(self, content: Any) -> bytes:
        return json_bytes(content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._leaves_body:
            return await super().__call__(scope, receive, send)
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        await _discard_body(receive, self._discard_seconds)
        await send({"type": "http.response.body", "body": b""})


async def _discard_body(receive: Receive, seconds: float) -> None:
    """Reads on to the end of the body, within limits."""
    left, is_open = DISCARD_BYTES, True
    try:
        async with asyncio.timeout(seconds):
            while is_open and left > 0:
                message = await receive()
                is_open = message["type"] == "http.request" and message.get("more_body", False)
                left -= len(message.get("body", b""))
    except TimeoutError:
        pass


def wrong(param: str | None, message: str, code: str | None = None) -> ApiError:
    """The request holds something that can't be used: status 400."""
    return ApiError(400, message, param=param, code=code)


def queue_full(capacity: int) -> ApiError:
    message = f"the server is busy: {capacity} choices wait or run, which is the most it takes; try again later"
    return ApiError(429, message, kind=BUSY, code="queue_full", retry_after=RETRY_SECONDS)


def too_many_connections() -> ApiError:
    message = "the server has as many connections as it takes (--max-connections); try again later"
    return ApiError(503, message, kind=SERVER, code="too_many_connections", retry_after=RETRY_SECONDS, leaves_body=True)


def too_slow(seconds: float, received: int) -> ApiError:
    message = f"the body did not come in time: {received} bytes of it after {seconds:.0f} s (--read-seconds)"
    return ApiError(408, message, code="request_timeout", leaves_body=True)


def shutting_down() -> ApiError:
    message = "the server is shutting down and takes no new requests"
    return ApiError(503, message, kind=SERVER, code="shutting_down", retry_after=RETRY_SECONDS)


def cut_off() -> ApiError:
    message = "the server shut down before the request was finished"
    return ApiError(503, message, kind=SERVER, code="shutting_down", retry_after=RETRY_SECONDS)


def engine_failed(reason: object) -> ApiError:
    return ApiError(503, f"the engine has failed and can't run requests: {reason}", kind=SERVER, code="engine_failed")


def request_failed(reason: str) -> ApiError:
    return ApiError(500, reason, kind=SERVER, code=REQUEST_FAILED)


def internal() -> ApiError:
    return ApiError(500, "internal error of the server; its log says more", kind=SERVER, code="internal_error")


def json_bytes(content: Any) -> bytes:
    """JSON in ASCII: half of a surrogate pair, which a caller may have sent and an error may quote, is no UTF-8."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
