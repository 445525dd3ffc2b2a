"""Writes grammars in the notation of the library llguidance, a dialect of Lark's.  Knows no format of calls."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

BLANK = " ?"  # between two tokens of a call's JSON, which models write on one line
LINES = r"( |\r?\n[ \t]{0,32})?"  # the same in an answer
ANY_TEXT = r"(.|\n)*"


class LarkWriter:
    """A grammar that is being written.

    special: ids of the tokens that a grammar must name by their id, by their texts.  Other tokens are what their text is.
    """

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._rules: list[str] = []
        self._names = dict[str, str]()
        names = sorted((name for name in special if name), key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None

    def text(self, literal: str) -> str:
        """What matches this text and nothing else."""
        pieces = [literal] if self._split is None else self._split.split(literal)
        return " ".join(f"<[{self._special[each]}]>" if each in self._special else quoted(each) for each in pieces if each)

    def json(self, schema: Mapping[str, Any], blank: str = BLANK) -> str:
        """What matches JSON that a schema allows.  blank: a regular expression of what may stand between its tokens."""
        options = {"whitespace_pattern": blank}
        said = schema.get("x-guidance")
        if isinstance(said, Mapping):
            options = {**({} if any(key.startswith("whitespace") for key in said) else options), **said}
        written = json.dumps({**schema, "x-guidance": options}, ensure_ascii=True)
        return self.named("%json " + written.replace("::=", "\\u003a:="), "json")  # which the library takes for a mark of GBNF

    def text_before(self, mark: str) -> str:
        """What matches any text up to the first place of a mark, and the mark."""
        if mark in self._special:
            return f"{self.named(f'/{ANY_TEXT}/', 'TEXT')} <[{self._special[mark]}]>"
        key = f"before {mark}"
        if key not in self._names:
            self._names[key] = name = f"before{len(self._rules)}"
            self._rules.append(f"{name}[suffix={quoted(mark)}]: /{ANY_TEXT}/")
        return self._names[key]

    def named(self, expression: str, kind: str = "rule") -> str:
        """A name for an expression, the same one for equal ones.  kind: a word in capitals for an expression of one lexeme."""
        if expression not in self._names:
            self._names[expression] = name = f"{kind}{len(self._rules)}" if kind.islower() else f"{kind}_{len(self._rules)}"
            self._rules.append(f"{name}: {expression}")
        return self._names[expression]

    def written(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join([f"start: {start}", *self._rules]) + "\n"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def joined(*expressions: str) -> str:
    """One after the other."""
    return " ".join(each for each in expressions if each)


def one_of(expressions: Iterable[str]) -> str:
    found = list(dict.fromkeys(expressions))
    return found[0] if len(found) == 1 else "(" + " | ".join(found) + ")"
