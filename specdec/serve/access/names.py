"""Reads lists of origins and of hosts, as options name them.  Imports no web framework."""

from __future__ import annotations

import re

ANY = "*"
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:]+\])(:[0-9]{1,5})?")


def origins_of(name: str, text: str) -> tuple[str, ...]:
    """The origins of a list with commas, as browsers spell them.  ValueError for what is none.  name: of the option."""
    origins = tuple(part.strip().lower().rstrip("/") for part in text.split(","))
    for origin in origins:
        if origin != ANY and not ORIGIN.fullmatch(origin):
            host = re.sub(r"^[a-z]+:/*|/.*$", "", origin) or "localhost:3000"
            raise ValueError(
                f"{name} must list origins such as https://example.com, or *, got {origin!r}; nearest setting that works: "
                f"{name}=http://{host}"
            )
    return origins


def hosts_of(name: str, text: str) -> tuple[str, ...]:
    """The names of a list with commas, in lower case.  ValueError for what is none."""
    hosts = tuple(part.strip().lower() for part in text.split(","))
    for host in hosts:
        if host != ANY and not re.fullmatch(r"[a-z0-9._-]+|\[[0-9a-f:]+\]", host):
            nearest = re.sub(r"^[a-z]+://|[/:].*$", "", host) or "localhost"
            raise ValueError(
                f"{name} must list names such as models.example.com, without scheme and port, or *, got {host!r}; nearest "
                f"setting that works: {name}={nearest}"
            )
    return hosts
