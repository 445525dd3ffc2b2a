"""Formats of calls that are a sequence of fixed texts, a function's name and its arguments as JSON.

Such a format is data; its grammar and its reader both follow from the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from specdec.chat.lark import LarkWriter, joined, one_of
from specdec.chat.said import NewId, Said, new_id
from specdec.chat.tools import Tool

BLANKS = " \t\r\n"


class Slot(Enum):
    """What stands between fixed texts."""

    BLANK = auto()  # nothing, as a grammar has it; a reader takes any blanks, here and in the next three
    SPACE = auto()  # one blank
    LINE = auto()  # one line break
    MAYBE = auto()  # one blank or nothing
    NAME = auto()  # the function's
    NUMBER = auto()  # of the call
    ARGUMENTS = auto()  # JSON of an object


Pieces = tuple[str | Slot, ...]
BLANK: Final = Slot.BLANK
SPACE: Final = Slot.SPACE
LINE: Final = Slot.LINE
MAYBE: Final = Slot.MAYBE
BLANKS_IN_LARK = {BLANK: "", SPACE: '" "', LINE: '"\\n"', MAYBE: '" "?'}
NAME: Final = Slot.NAME
NUMBER: Final = Slot.NUMBER
ARGUMENTS: Final = Slot.ARGUMENTS


def json_call(key: str) -> Pieces:
    """`{"name": NAME, "arguments": ARGUMENTS}`.  key: of the arguments."""
    begin = ("{", BLANK, '"name"', BLANK, ":", SPACE, '"', NAME, '"')
    return (*begin, BLANK, ",", SPACE, f'"{key}"', BLANK, ":", SPACE, ARGUMENTS, BLANK, "}")


@dataclass(frozen=True)
class PieceFormat:
    """A format of pieces.

    opening: the markers.  call: one call.  between: what stands between two calls.  end: what follows the last one.
    first: the first call after a marker, where that holds a part of it; by the marker's number.
    """

    name: str
    opening: tuple[str, ...]
    call: Pieces
    between: Pieces  # with a fixed text, by which the next call is known
    end: Pieces = ()
    at_start: bool = False
    first: Pieces | None = None
    new_id: NewId = new_id
    keeps_marker: bool = False

    def markers(self, tools: Sequence[Tool]) -> tuple[str, ...]:
        return self.opening

    def after(self, tools: Sequence[Tool], several: bool, lark: LarkWriter) -> str:
        first = self._expression(self.first or self.call, tools, lark)
        more = ""
        if several:
            again = joined(self._fixed(self.between, lark), self._expression(self.call, tools, lark))
            more = f"({again})*"
        return joined(first, more, self._fixed(self.end, lark))

    def reader(self, tools: Sequence[Tool], marker: str) -> PieceReader:
        return PieceReader(self, frozenset(tool.name for tool in tools))

    def _expression(self, pieces: Pieces, tools: Sequence[Tool], lark: LarkWriter) -> str:
        place = pieces.index(NAME)
        calls = [
            lark.named(joined(lark.text(tool.name), self._fixed(pieces[place + 1 :], lark, tool)), "call") for tool in tools
        ]
        return lark.named(joined(self._fixed(pieces[:place], lark), one_of(calls)), "call")

    def _fixed(self, pieces: Pieces, lark: LarkWriter, tool: Tool | None = None) -> str:
        """The expression of pieces without a name.  tool: whose arguments they hold."""
        written = list[str]()
        for piece in pieces:
            if isinstance(piece, str):
                written.append(lark.text(piece))
            elif piece in BLANKS_IN_LARK:
                written.append(BLANKS_IN_LARK[piece])
            elif piece is NUMBER:
                written.append(lark.named("/[0-9]{1,3}/", "NUMBER"))
            else:
                assert piece is ARGUMENTS and tool is not None
                written.append(lark.json(tool.parameters))
        return joined(*written)


class JsonEnd:
    """Finds the end of a JSON object whose text comes in pieces."""

    def __init__(self) -> None:
        self._depth, self._in_text, self._is_escaped = 0, False, False

    def find(self, text: str) -> int | None:
        """The place after the object's last character; None: the object goes on."""
        for place, character in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._in_text:
                self._is_escaped, self._in_text = character == "\\", character != '"'
            elif character == '"':
                self._in_text = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return place + 1
        return None


class PieceReader:
    """Reads calls of a PieceFormat after their marker.  A call is said when its arguments begin.

    leftover: see CallReader; what breaks the format is left over, too.
    """

    def __init__(self, form: PieceFormat, names: frozenset[str]) -> None:
        self._form, self._names = form, names
        self._pieces, self._place = form.first or form.call, 0
        self._buffer, self._call = "", 0  # text that no piece has taken; the current call's number
        self._name = self._taken = ""  # of the current call: its name, and what its pieces have taken before its arguments
        self._number: str | None = None
        self._json: JsonEnd | None = None
        self.leftover: str | None = None

    def feed(self, text: str) -> list[Said]:
        said = list[Said]()
        if self.leftover is not None:
            self.leftover += text
            return said
        self._buffer += text
        while self._step(said):
            pass
        return said

    def finish(self) -> list[Said]:
        if self.leftover is None:
            is_between = self._place == len(self._pieces) or self._json is not None
            self.leftover = self._buffer if is_between else self._taken + self._buffer
        return []

    def _step(self, said: list[Said]) -> bool:
        """Reads one piece on.  False: it needs more text, or the calls have ended."""
        if self.leftover is not None:
            return False
        if self._place == len(self._pieces):
            return self._go_on()
        piece, buffer = self._pieces[self._place], self._buffer
        if piece in BLANKS_IN_LARK:
            self._take(len(buffer) - len(buffer.lstrip(BLANKS)))
            if not self._buffer:
                return False
        elif piece is NAME or piece is NUMBER:
            size = _length(buffer, piece)
            if size == len(buffer):
                return False
            if piece is NAME:
                self._name = buffer[:size]
                if self._name not in self._names:
                    return self._break()
            else:
                self._number = buffer[:size]
            self._take(size)
        elif piece is ARGUMENTS:
            return self._arguments(said)
        else:
            assert isinstance(piece, str)
            if not buffer.startswith(piece):
                return False if piece.startswith(buffer) else self._break()
            self._take(len(piece))
        self._place += 1
        return True

    def _arguments(self, said: list[Said]) -> bool:
        buffer = self._buffer
        if not buffer:
            return False
        if self._json is None:
            if not buffer.startswith("{"):
                return self._break()
            self._json = JsonEnd()
            own = f"functions.{self._name}:{self._number}" if self._number is not None else self._form.new_id()
            said.append(Said("call", self._name, self._call, own))
        end = self._json.find(buffer)
        said.append(Said("arguments", buffer[:end], self._call))
        self._buffer = "" if end is None else buffer[end:]
        if end is None:
            return False
        self._json, self._taken = None, ""
        self._place += 1
        return True

    def _take(self, size: int) -> None:
        self._taken += self._buffer[:size]
        self._buffer = self._buffer[size:]

    def _go_on(self) -> bool:
        """After a call: another one begins, or the calls have ended."""
        buffer = self._buffer
        sizes = {pieces: _begins(pieces, buffer) for pieces in (self._form.between, self._form.end) if pieces}
        if (size := sizes.get(self._form.between)) is not None and size >= 0:
            self._buffer = buffer[size:]
            self._pieces, self._place, self._taken, self._number = self._form.call, 0, "", None
            self._call += 1
            return True
        if self._form.end and (size := sizes[self._form.end]) is not None and size >= 0:
            self.leftover = buffer[size:]
            return False
        if all(size is not None for size in sizes.values()):  # it is neither
            self.leftover = buffer
        return False

    def _break(self) -> bool:
        """What has come is no call."""
        self.leftover, self._buffer, self._taken = self._taken + self._buffer, "", ""
        return False


def _length(text: str, slot: Slot) -> int:
    """How many characters of a name or a number a text begins with."""
    for size, character in enumerate(text):
        is_part = character.isdigit() or (slot is NAME and (character.isalnum() or character in "_.-"))
        if not (is_part and character.isascii()):
            return size
    return len(text)


def _begins(pieces: Pieces, text: str) -> int | None:
    """How many characters of a text are these pieces, fixed texts and blanks; -1: it begins otherwise.

    None: that needs more text.
    """
    left = text
    for piece in pieces:
        if piece in BLANKS_IN_LARK:
            left = left.lstrip(BLANKS)
            continue
        assert isinstance(piece, str)
        if not left.startswith(piece):
            return None if piece.startswith(left) else -1
        left = left[len(piece) :]
    return len(text) - len(left)
