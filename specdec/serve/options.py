"""Every limit of the HTTP server, once: its name, default, bounds, meaning and command-line flag.

`specdec serve` takes its flags from the fields of ServeOptions.  This file knows no decoder and imports no web framework.
"""

from __future__ import annotations

import ipaddress
import math
import os
from dataclasses import dataclass, fields
from typing import Any

from specdec.chat.form import AUTO, REASONING_PARSERS, TOOL_PARSERS
from specdec.limits import MAX_LOGPROBS, MOST_LOGPROBS
from specdec.options import option, setting_of

KEY_VARIABLE = "SPECDEC_API_KEY"


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """How the HTTP server listens and what it lets in: checked when the object is made."""

    host: str = option("127.0.0.1", "the address to listen on; other machines reach only one that is not loopback")
    port: int = option(8000, "the port to listen on; 0 takes a free one", bounds=(0, 65535))
    api_key: str | None = option(
        None,
        "callers must send this key as a bearer token, except to /health, /ready and /metrics; other users of the machine can "
        f"read flags, so set {KEY_VARIABLE} in the environment instead; default: no key",
        metavar="KEY",
    )
    model_name: str | None = option(
        None, "what requests call the model; default: the last part of --target, specdec for the shipped pair", metavar="NAME"
    )
    max_queue: int = option(
        256, "choices that may wait besides the --max-batch-size that run; further requests get status 429", bounds=(0, 1 << 20)
    )
    max_body_bytes: int = option(4 << 20, "the longest body of a request; longer ones get status 413", bounds=(1024, 1 << 30))
    max_connections: int | None = option(
        None,
        "connections that may be open at once; further ones get status 503; default: what the limit of open files leaves, at "
        "most 16384",
        bounds=(1, 1 << 20),
    )
    read_seconds: int = option(
        30,
        "how long a client may take to send the head of a request, and then its body, which has a second more for each 16 KiB "
        "of it",
        bounds=(1, 24 * 3600),
    )
    write_seconds: int = option(
        120, "how long a client may read nothing of an answer before its connection is closed", bounds=(1, 24 * 3600)
    )
    max_tokens_cap: int | None = option(
        None,
        "the most output tokens that a request may ask for; default: what the context and the KV pool hold",
        bounds=(1, math.inf),
    )
    max_logprobs: int = option(
        MAX_LOGPROBS, "the most likeliest tokens whose log-probabilities a request may ask for", bounds=(0, MOST_LOGPROBS)
    )
    grace_seconds: int = option(
        30, "after SIGTERM or Ctrl-C, how long requests that run may take to finish", bounds=(0, 24 * 3600)
    )
    tool_parser: str = option(
        AUTO,
        "how the model writes calls of tools; auto: as its chat template tells; none: requests with tools are refused",
        choices=TOOL_PARSERS,
    )
    reasoning_parser: str = option(
        AUTO,
        "how the model marks thoughts, which answers then hold apart; auto: as its chat template tells; none: not at all",
        choices=REASONING_PARSERS,
    )
    lenient: bool = option(False, "leave out fields of requests that this server does not know, in place of an error")
    page: bool = option(True, "answer / with a playground, a page that uses this API and holds no caller's data")
    log_prompts: bool = option(False, "write prompts and output texts to the log, which otherwise holds no text of any request")

    def __post_init__(self) -> None:
        for name in ("host", "api_key", "model_name"):
            _check_text(name, getattr(self, name), optional=name != "host")
        for item in fields(self):
            setting_of(item).check(item.name, getattr(self, item.name), item.default)

    @property
    def name(self) -> str:
        """What requests call the model."""
        return self.model_name or "specdec"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


def key_of_environment() -> str | None:
    """The API key that the environment holds, where other users can't read it.  ValueError if it is set, but empty."""
    key = os.environ.get(KEY_VARIABLE)
    if key == "":
        raise ValueError(f"{KEY_VARIABLE} is set in the environment, but empty; nearest thing that works: unset it, for no key")
    return key


def _check_text(name: str, value: Any, optional: bool) -> None:
    """TypeError or ValueError unless the value is printable ASCII without spaces.  The message never shows an API key."""
    if value is None and optional:
        return
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got a value of type {type(value).__name__}")
    if not value or not all("!" <= character <= "~" for character in value):
        shown = "" if name == "api_key" else f", got {value!r}"
        plain = "-".join("".join(c if "!" <= c <= "~" else " " for c in value).split()) if name == "model_name" else ""
        hint = f"; nearest setting that works: {name}={plain!r}" if plain else ""
        raise ValueError(f"{name} must be printable ASCII characters without spaces, at least one{shown}{hint}")
