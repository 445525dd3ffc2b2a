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
from specdec.checks import option, setting_of
from specdec.limits import MAX_LOGPROBS, MOST_LOGPROBS
from specdec.serve.access.names import hosts_of, origins_of

KEY_VARIABLE = "SPECDEC_API_KEY"
ALIASES = ("vllm", "sglang")  # servers whose names of metrics there are


def _read_aliases(name: str, value: Any) -> str:
    """TypeError or ValueError unless the value names servers of ALIASES, each once, with commas in between."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, got a value of type {type(value).__name__}")
    given = value.split(",")
    if len({*given}) < len(given) or not {*given} <= {*ALIASES}:
        known = [each for each in ALIASES if each in given] or ALIASES
        expected = f"{name} must be one or several of {', '.join(ALIASES)}, each once, with commas in between"
        raise ValueError(f"{expected}, got {value[:80]!r}; nearest setting that works: {name}={','.join(known)!r}")
    return value


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """How the HTTP server listens and what it lets in: checked when the object is made."""

    host: str = option("127.0.0.1", "the address to listen on; other machines reach only one that is not loopback")
    port: int = option(8000, "the port to listen on; 0 takes a free one", bounds=(0, 65535))
    api_key: str | None = option(
        None,
        "callers must send this key as a bearer token, or in the header x-api-key, except to /health, /ready and /metrics; "
        f"other users of the machine can read flags, so set {KEY_VARIABLE} in the environment instead; default: no key",
        metavar="KEY",
    )
    model_name: str | None = option(
        None, "what requests call the model; default: the last part of --target, specdec for the shipped pair", metavar="NAME"
    )
    allowed_origins: str | None = option(
        None,
        "web pages that may use the server from a browser: their origins, such as https://example.com, with commas between "
        "them, or * for all; default: none but the server's own page",
        metavar="ORIGINS",
    )
    allowed_hosts: str | None = option(
        None,
        "names besides localhost under which a server on loopback without a key may be asked for, with commas between them, or "
        "* for all; another Host gets status 421",
        metavar="NAMES",
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
    metrics_aliases: str | None = option(
        None,
        "export the counters of speculation under other servers' names too, which published dashboards read: vllm, sglang or "
        "vllm,sglang",
        others=_read_aliases,
        metavar="NAMES",
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
    lenient: bool = option(
        False, "leave out fields of requests that this server does not know, in place of an error, and say so in a header"
    )
    page: bool = option(True, "answer / with a playground, a page that uses this API and holds no caller's data")
    log_prompts: bool = option(False, "write prompts and output texts to the log, which otherwise holds no text of any request")

    def __post_init__(self) -> None:
        for name in ("host", "api_key", "model_name", "allowed_origins", "allowed_hosts"):
            _check_text(name, getattr(self, name), optional=name != "host")
        _ = self.origins, self.hosts  # what can't be read is an error now
        for item in fields(self):
            setting_of(item).check(item.name, getattr(self, item.name), item.default)
        if self.allowed_hosts is not None and not (self.is_loopback and self.api_key is None):
            raise ValueError(
                "allowed_hosts is for a server on loopback without a key, where pages could get in under another name; nearest "
                "setting that works: allowed_hosts=None"
            )

    @property
    def name(self) -> str:
        """What requests call the model."""
        return self.model_name or "specdec"

    @property
    def aliases(self) -> tuple[str, ...]:
        """The servers of ALIASES whose names of metrics there are."""
        return tuple(self.metrics_aliases.split(",")) if self.metrics_aliases else ()

    @property
    def origins(self) -> tuple[str, ...]:
        """allowed_origins, one by one."""
        return () if self.allowed_origins is None else origins_of("allowed_origins", self.allowed_origins)

    @property
    def hosts(self) -> tuple[str, ...]:
        """allowed_hosts, one by one."""
        return () if self.allowed_hosts is None else hosts_of("allowed_hosts", self.allowed_hosts)

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
