"""How much the HTTP server lets in: the queue of choices, and the API key.  Knows no endpoint."""

from __future__ import annotations

import hmac
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256

from specdec.engine.request import Request
from specdec.serve.wire.errors import ApiError, queue_full, wrong


class QueuedRequest:
    """The choices of one HTTP request in the queue.  requests: None until their prompts have been checked."""

    def __init__(self, choices: int) -> None:
        self.choices = choices
        self.requests: Sequence[Request] | None = None

    @property
    def open_choices(self) -> int:
        """Choices that wait or run.  One that has ended counts no more, however slowly its text is read."""
        return self.choices if self.requests is None else sum(not request.is_done for request in self.requests)


class Queue:
    """The HTTP requests under way, and the bound of their choices.  For one event loop.

    capacity: the most choices that run or wait.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._requests: set[QueuedRequest] = set()

    @property
    def open_choices(self) -> int:
        return sum(request.open_choices for request in self._requests)

    @property
    def is_empty(self) -> bool:
        """Whether no HTTP request is under way, read to its end included."""
        return not self._requests

    @contextmanager
    def enter(self, choices: int, field: str) -> Iterator[QueuedRequest]:
        """Holds so many choices while the block runs.  ApiError 429 if there is no room now, 400 if there never will be.

        field: the field that asks for the choices.
        """
        if choices > self.capacity:
            raise wrong(
                field,
                f"the request asks for {choices} choices (prompts * n); this server takes at most {self.capacity} at once, its "
                f"--max-batch-size + --max-queue; nearest thing that works: {self.capacity} choices a request",
            )
        if self.open_choices + choices > self.capacity:
            raise queue_full(self.capacity)
        queued = QueuedRequest(choices)
        self._requests.add(queued)
        try:
            yield queued
        finally:
            self._requests.discard(queued)


class KeyCheck:
    """Whether a request brings the API key.  The comparison takes as long for every wrong key."""

    def __init__(self, key: str | None) -> None:
        self._digest = None if key is None else sha256(key.encode()).digest()

    def error(self, authorization: bytes, bare: bytes) -> ApiError | None:
        """The error of these headers, Authorization and x-api-key; None: one of them brings the key, or none is needed."""
        if self._digest is None:
            return None
        scheme, _, token = authorization.strip().partition(b" ")
        given = [token.strip() if scheme.lower() == b"bearer" else b"", bare.strip()]
        if any([hmac.compare_digest(sha256(each).digest(), self._digest) and bool(each) for each in given]):  # both, always
            return None
        what = "wrong" if any(given) else "missing"
        message = f"the API key is {what}: expected the header Authorization: Bearer KEY, or x-api-key: KEY"
        return ApiError(401, message, code="invalid_api_key", leaves_body=True)
