"""Values as Python or JSON writes them, read from a text whose end may be missing."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from specdec.chat.arguments.cursor import BrokenCall, IncompleteCall, TextCursor

WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
MAX_DEPTH = 64  # of lists and objects within each other


def value_at(cursor: TextCursor, depth: int = 0) -> Any:
    """The value that comes next.  IncompleteCall if it may go on, BrokenCall if it is none."""
    if depth > MAX_DEPTH:
        raise BrokenCall
    cursor.blanks()
    if cursor.place == len(cursor.text):
        raise IncompleteCall
    first = cursor.text[cursor.place]
    if first in "'\"":
        return _text(cursor, first)
    if first in "[(":
        return _items(cursor, "]" if first == "[" else ")", depth)
    if first == "{":
        return _object(cursor, depth)
    word = cursor.span(lambda character: character.isalnum() or character in "+-._")
    if word in WORDS:
        return WORDS[word]
    if NUMBER.fullmatch(word):
        try:
            return json_value(re.sub("^(-?)0+(?=[0-9])", r"\1", word))  # JSON has no zeros before a number
        except ValueError:
            raise BrokenCall from None
    raise BrokenCall


def json_value(text: str) -> Any:
    """The value of JSON that a model has written.  ValueError for what is none, and for what can't be written as JSON again."""
    try:
        return json.loads(text, parse_constant=_refused, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is too large a number")
    return number


def _refused(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _text(cursor: TextCursor, quote: str) -> str:
    """A text in quotes of either kind."""
    end, is_escaped = cursor.place + 1, False
    while end < len(cursor.text) and (is_escaped or cursor.text[end] != quote):
        is_escaped = not is_escaped and cursor.text[end] == "\\"
        end += 1
    if end >= len(cursor.text):
        raise IncompleteCall
    held = cursor.text[cursor.place + 1 : end]
    cursor.place = end + 1
    if quote == "'":  # as JSON would write it
        held = re.sub(r"\\(.)|\"", lambda found: '\\"' if found[0] == '"' else "'" if found[1] == "'" else found[0], held)
    try:
        return str(json.loads(f'"{held}"', strict=False))
    except ValueError:
        raise BrokenCall from None


def _items(cursor: TextCursor, end: str, depth: int) -> list[Any]:
    cursor.place += 1
    found = list[Any]()
    while True:
        cursor.blanks()
        if cursor.starts(end):
            cursor.take(end)
            return found
        if found:
            cursor.take(",")
        found.append(value_at(cursor, depth + 1))


def _object(cursor: TextCursor, depth: int) -> dict[str, Any]:
    cursor.place += 1
    found = dict[str, Any]()
    while True:
        cursor.blanks()
        if cursor.starts("}"):
            cursor.take("}")
            return found
        if found:
            cursor.take(",")
        key = value_at(cursor, depth + 1)
        if not isinstance(key, str):
            raise BrokenCall
        cursor.blanks()
        cursor.take(":")
        found[key] = value_at(cursor, depth + 1)
