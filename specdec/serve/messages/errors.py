"""Errors as Anthropic's API writes them: {"type": "error", "error": {"type", "message"}, "request_id"}."""

from __future__ import annotations

from typing import Any

from specdec.serve.wire.errors import ApiError

MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
TYPES = {  # by status; of other ones it is what OpenAI's is called too
    401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
    500: "api_error", 503: "overloaded_error",
}  # fmt: skip


def is_of_messages(path: str) -> bool:
    """Whether the path belongs to Anthropic's API, or would if it were there."""
    return path == MESSAGES or path.startswith(MESSAGES + "/")


def body_for(path: str, error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """The body of an error in the form of the path's API.  request_id: None: it has none."""
    return error_body(error, request_id) if is_of_messages(path) else error.as_json()


def error_body(error: ApiError, request_id: str | None) -> dict[str, Any]:
    """The body of an error.  request_id: None: it has none, as an event of a stream, whose header has said it."""
    told = {"type": TYPES.get(error.status, "invalid_request_error"), "message": error.message}
    return {"type": "error", "error": told, **({} if request_id is None else {"request_id": request_id})}
