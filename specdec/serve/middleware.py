"""What happens around every request: its id, the API key, errors that nobody expected, and its line in the log."""

from __future__ import annotations

import secrets
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.serve.access.checks import Headers
from specdec.serve.log import CLIENT_GONE, LogEntry
from specdec.serve.messages.errors import body_for, is_of_messages
from specdec.serve.page.files import PATHS
from specdec.serve.state import ServerState
from specdec.serve.times import TIMES, ServeTimes
from specdec.serve.wire.errors import ApiError, ErrorAnswer, internal

OPEN_PATHS = ("/health", "/ready", "/metrics")  # without a key, and without a line in the log: they are asked all the time
ENTRY = "specdec.entry"  # where endpoints find the LogEntry in an ASGI scope
MAX_ID_LENGTH = 128  # callers may choose ids
GIVEN_ID = "specdec.id"  # where the middleware finds the request's id in an ASGI scope, if whoever is in front has named it


class RequestMiddleware:
    """ASGI middleware around all endpoints."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        state, given = self._state, scope.get(GIVEN_ID, "")
        path = scope["path"].removeprefix(scope.get("root_path", ""))  # as the router sees it
        entry = LogEntry(given or _own_id(scope) or "req-" + secrets.token_hex(12), scope["method"], path)
        for_page = state.origins.headers(_header(scope, b"origin"))
        scope[ENTRY] = entry
        is_open = entry.path in OPEN_PATHS or (state.options.page and entry.path in PATHS)

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                entry.status = message["status"]
                named = [] if given else [(b"x-request-id", entry.id.encode())]  # whoever has named it tells the caller
                if is_of_messages(path):
                    named.append((b"request-id", entry.id.encode()))  # which Anthropic's clients read
                message["headers"] = [*message.get("headers", ()), *named, *for_page]
            await send(message)

        try:
            error = None if state.host_check is None else state.host_check.error(scope)
            if error is None and (allowed := state.origins.preflight(scope)) is not None:  # which brings no key
                return await Response(None, 204, dict(_texts(allowed)))(scope, receive, noted)
            if error is None and not is_open:
                error = state.key_check.error(_header(scope, b"authorization"), _header(scope, b"x-api-key"))
            if error is None:
                await self._app(scope, receive, noted)
            else:
                entry.failed(error)
                await error_answer(error, entry, state.times)(scope, receive, noted)
        except Exception as crash:  # a bug of any kind is answered with 500, and the log says where it is
            entry.crashed(crash)
            if not entry.status:
                await error_answer(internal(), entry)(scope, receive, noted)
        except BaseException:  # the task was cancelled: noted for the log, and raised again
            entry.status = entry.status or CLIENT_GONE
            raise
        finally:
            state.counts.ended(entry.path, entry.status, entry.end)
            if not is_open:
                entry.write()


def error_answer(error: ApiError, entry: LogEntry, times: ServeTimes = TIMES) -> ErrorAnswer:
    """The response to an error, in the form of the path's API."""
    return ErrorAnswer(error, body_for(entry.path, error, entry.id), times.discard)


def _own_id(scope: Any) -> str:
    """The id that the caller has given the request; empty if there is none, or one that is no plain word."""
    given = _header(scope, b"x-request-id").decode("latin-1")
    return given if len(given) <= MAX_ID_LENGTH and all("!" <= character <= "~" for character in given) else ""


def _texts(headers: Headers) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]


def _header(scope: Any, name: bytes) -> bytes:
    """A header's value; empty if there is none, or more than one."""
    values = [value for key, value in scope["headers"] if key == name]
    return values[0] if len(values) == 1 else b""
