"""Which web pages may use the server from a browser, and under which names it may be asked for.  Knows no endpoint.

A browser lets a page read the answers of another site only if that site says so (CORS).  A page whose own name is made to point
to this machine (DNS rebinding) needs no such leave, but its requests carry that name in the header Host.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from starlette.types import Scope

from specdec.serve.access.names import ANY
from specdec.serve.wire.errors import ApiError

Headers = list[tuple[bytes, bytes]]
HEADER_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+( *, *[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")
METHODS, EXPOSED, SECONDS = b"GET, HEAD, POST, OPTIONS", b"x-request-id, request-id, retry-after, x-specdec-left-out", b"600"


class OriginCheck:
    """What browsers are told.  allowed: origins of `origins_of`; none: no page of another site may use the server."""

    def __init__(self, allowed: Sequence[str]) -> None:
        self._allowed = frozenset(allowed)

    def headers(self, origin: bytes) -> Headers:
        """Of an answer to a page of that origin; none if it may not read it, or there is no page."""
        if not self._allowed:
            return []
        vary = [] if ANY in self._allowed else [(b"vary", b"Origin")]
        if not origin or not self._allows(origin):
            return vary
        return [*vary, (b"access-control-allow-origin", self._said(origin)), (b"access-control-expose-headers", EXPOSED)]

    def preflight(self, scope: Scope) -> Headers | None:
        """The headers that answer a browser's question before a request; None: it is none, or the page is not allowed."""
        given = dict(scope["headers"])
        origin, asked = given.get(b"origin", b""), given.get(b"access-control-request-headers", b"")
        if scope["method"] != "OPTIONS" or b"access-control-request-method" not in given or not self._allows(origin):
            return None
        headers = [(b"access-control-allow-methods", METHODS), (b"access-control-max-age", SECONDS)]
        if HEADER_NAMES.fullmatch(asked):
            headers.append((b"access-control-allow-headers", asked))
        if given.get(b"access-control-request-private-network") == b"true":
            headers.append((b"access-control-allow-private-network", b"true"))
        return headers

    def _allows(self, origin: bytes) -> bool:
        return bool(origin) and (ANY in self._allowed or origin.decode("latin-1").lower() in self._allowed)

    def _said(self, origin: bytes) -> bytes:
        return ANY.encode() if ANY in self._allowed else origin


class HostCheck:
    """Refuses requests under names that are not this server's.  own: names besides those of loopback; with ANY, all are."""

    def __init__(self, own: Sequence[str]) -> None:
        self._own = frozenset(own)

    def error(self, scope: Scope) -> ApiError | None:
        """None for a request under a known name, and for one without a name, which no browser sends."""
        names = [value for key, value in scope["headers"] if key == b"host"]
        if not names or ANY in self._own or all(self._knows(name.decode("latin-1")) for name in names):
            return None
        message = "the header Host names a site that is not this server's; it takes localhost, addresses of loopback and those "
        message += "that --allowed-hosts lists; nearest thing that works: ask for 127.0.0.1"
        return ApiError(421, message, code="unknown_host", leaves_body=True)

    def _knows(self, host: str) -> bool:
        name = re.sub(r":[0-9]*$", "", host.strip().lower())
        if name in self._own or name == "localhost" or name.endswith(".localhost"):
            return True
        try:
            return ipaddress.ip_address(name.strip("[]")).is_loopback
        except ValueError:
            return False
