"""Families that write calls as a list of calls in Python, such as Llama 4 and small Llama 3.2, by their model cards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdec.chat.arguments.cursor import BrokenCall, TextCursor, in_name
from specdec.chat.arguments.literals import value_at
from specdec.chat.arguments.values import Parameter, all_in_order, parameters_of
from specdec.chat.arguments.whole_calls import Call, WholeCallReader
from specdec.chat.lark import LarkWriter, joined, one_of
from specdec.chat.tools import Tool

WORDS = {"boolean": ("True", "False"), "null": ("None",)}  # by the type in JSON


@dataclass(frozen=True)
class PythonicFormat:
    """`[name(key=value, ...), ...]`, where an answer begins so with the name of a tool."""

    name: str = "pythonic"
    at_start: bool = True
    keeps_marker: bool = True

    def markers(self, tools: Sequence[Tool]) -> tuple[str, ...]:
        return tuple(f"[{tool.name}(" for tool in tools)

    def after(self, tools: Sequence[Tool], several: bool, lark: LarkWriter) -> str:
        call = lark.named(one_of([self._call(tool, lark) for tool in tools]), "call")
        more = f"({joined(lark.text(', '), call)})*" if several else ""
        return joined(lark.text("["), call, more, lark.text("]"))

    def _call(self, tool: Tool, lark: LarkWriter) -> str:
        parameters = parameters_of(tool)
        for each in parameters:
            if not each.name.isidentifier():
                raise ValueError(
                    f"the parameter {each.name[:100]!r} of {tool.name!r} is no name in Python, as this model's format of calls "
                    "needs; nearest thing that works: letters, digits and underscores"
                )
        written = [joined(lark.text(f"{each.name}="), _value(each, lark)) for each in parameters]
        arguments = all_in_order(parameters, written, lark.text(", "), lark)
        return lark.named(joined(lark.text(f"{tool.name}("), arguments, lark.text(")")), "call")

    def reader(self, tools: Sequence[Tool], marker: str) -> WholeCallReader:
        names = {tool.name for tool in tools}

        def next_call(cursor: TextCursor, count: int) -> Call | None:
            cursor.blanks()
            if count and not cursor.starts(","):
                cursor.take("]")
                return None
            cursor.place += 1 if count else 0
            cursor.blanks()
            name = marker[1:-1] if not count else cursor.span(in_name)
            if name not in names:
                raise BrokenCall
            if count:
                cursor.take("(")
            return name, _arguments(cursor)

        return WholeCallReader(next_call)


def _value(parameter: Parameter, lark: LarkWriter) -> str:
    """What matches a value: JSON, and Python's words where JSON has others."""
    words = [lark.text(word) for kind in sorted(parameter.types or ()) for word in WORDS.get(kind, ())]
    if parameter.types is not None and parameter.types <= WORDS.keys():
        return one_of(words)
    return one_of([lark.json(parameter.schema), *words])


def _arguments(cursor: TextCursor) -> dict[str, Any]:
    """The arguments of a call by name, up to its closing parenthesis, which is taken too."""
    found = dict[str, Any]()
    while True:
        cursor.blanks()
        if cursor.starts(")"):
            cursor.take(")")
            return found
        if found:
            cursor.take(",")
            cursor.blanks()
        key = cursor.span(in_name)
        cursor.blanks()
        cursor.take("=")
        found[key] = value_at(cursor)


PYTHONIC = PythonicFormat()
