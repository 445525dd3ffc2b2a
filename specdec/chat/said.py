"""What an answer says, part by part, as its text comes in pieces."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from specdec.chat.lark import LarkWriter
from specdec.chat.tools import Tool

Kind = Literal["content", "thought", "call", "arguments"]
NewId = Callable[[], str]  # makes the id of a call
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


@dataclass(frozen=True)
class Said:
    """A piece of an answer.  text: a piece of content, of a thought, or of a call's arguments; of a call its function's name.

    call: the call's number, from 0 on.  id: of a call.
    """

    kind: Kind
    text: str
    call: int = 0
    id: str = field(default="", compare=False)  # it is drawn


@dataclass(frozen=True)
class ToolCall:
    """A whole call.  arguments: JSON of an object, unless the answer was cut off within it."""

    name: str
    arguments: str
    id: str = field(default="", compare=False)


class CallReader(Protocol):
    """Reads calls after their marker.  leftover: text after the last one; None: the calls have not ended."""

    leftover: str | None

    def feed(self, text: str) -> list[Said]: ...

    def finish(self) -> list[Said]:
        """What can be said when no more text comes."""
        ...


class ToolFormat(Protocol):
    """How a family of models writes calls.

    at_start: whether a marker counts at the beginning of an answer alone.
    keeps_marker: whether `after` begins with the marker.
    """

    @property
    def name(self) -> str: ...

    @property
    def at_start(self) -> bool: ...

    @property
    def keeps_marker(self) -> bool: ...

    def markers(self, tools: Sequence[Tool]) -> tuple[str, ...]:
        """Texts after which calls begin; the first is the usual one."""
        ...

    def after(self, tools: Sequence[Tool], several: bool, lark: LarkWriter) -> str:
        """The expression that matches what follows a marker, up to the answer's end.

        ValueError for a schema whose values the format can't write.
        """
        ...

    def reader(self, tools: Sequence[Tool], marker: str) -> CallReader: ...


def new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def short_id() -> str:
    """Nine letters and digits, which templates of Mistral insist on."""
    return "".join(secrets.choice(LETTERS) for _ in range(9))
