"""Reads a text whose end may still be missing."""

from __future__ import annotations

from collections.abc import Callable

BLANKS = " \t\r\n"


class IncompleteCall(Exception):
    """The text may go on in the expected way."""


class BrokenCall(Exception):
    """The text is not what was expected."""


class TextCursor:
    """A place in a text."""

    def __init__(self, text: str) -> None:
        self.text, self.place = text, 0

    def blanks(self) -> None:
        while self.place < len(self.text) and self.text[self.place] in BLANKS:
            self.place += 1

    def starts(self, literal: str) -> bool:
        """Whether a text comes next; IncompleteCall if that can't be said yet."""
        rest = self.text[self.place : self.place + len(literal)]
        if rest == literal:
            return True
        if literal.startswith(rest):
            raise IncompleteCall
        return False

    def take(self, literal: str) -> None:
        if not self.starts(literal):
            raise BrokenCall
        self.place += len(literal)

    def until(self, mark: str) -> str:
        """What stands before a mark, which is taken too."""
        end = self.text.find(mark, self.place)
        if end < 0:
            raise IncompleteCall
        found = self.text[self.place : end]
        self.place = end + len(mark)
        return found

    def span(self, belongs: Callable[[str], bool]) -> str:
        """All characters of a kind; one of another kind must come after them."""
        begin = self.place
        while self.place < len(self.text) and belongs(self.text[self.place]):
            self.place += 1
        if self.place == len(self.text):
            raise IncompleteCall
        return self.text[begin : self.place]


def in_name(character: str) -> bool:
    """Whether a function's name may hold a character."""
    return character.isascii() and (character.isalnum() or character in "_.-")
