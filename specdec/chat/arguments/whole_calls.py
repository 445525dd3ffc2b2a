"""Reads formats whose calls can be said only when they are complete, because their arguments are no JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from specdec.chat.arguments.cursor import BrokenCall, IncompleteCall, TextCursor
from specdec.chat.said import Said, new_id

SURROGATE = re.compile("[\ud800-\udfff]")
Call = tuple[str, dict[str, Any]]  # a function's name and its arguments


class WholeCallReader:
    """Reads calls after their marker.

    next_call: reads a call; with the number of calls so far.  None: there is no further one, and the place is after the last.
    """

    def __init__(self, next_call: Callable[[TextCursor, int], Call | None]) -> None:
        self._next, self._buffer, self._count = next_call, "", 0
        self.leftover: str | None = None

    def feed(self, text: str) -> list[Said]:
        said = list[Said]()
        if self.leftover is not None:
            self.leftover += text
            return said
        self._buffer += text
        while self.leftover is None:
            cursor = TextCursor(self._buffer)
            try:
                call = self._next(cursor, self._count)
            except IncompleteCall:
                break
            except BrokenCall:
                self.leftover = self._buffer
                break
            self._buffer = self._buffer[cursor.place :]
            if call is None:
                self.leftover = self._buffer
                break
            name, arguments = call
            said.append(Said("call", name, self._count, new_id()))
            said.append(Said("arguments", _as_json(arguments), self._count))
            self._count += 1
        return said

    def finish(self) -> list[Said]:
        if self.leftover is None:
            self.leftover = self._buffer
        return []


def _as_json(arguments: dict[str, Any]) -> str:
    """In ASCII where it holds half of a surrogate pair, which is no UTF-8."""
    written = json.dumps(arguments, ensure_ascii=False)
    return written if written.isascii() or not SURROGATE.search(written) else json.dumps(arguments)
