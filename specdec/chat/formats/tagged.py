"""Families that write each argument between tags: GLM 4.5 and later, and Qwen3-Coder, by their published chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.chat.arguments.cursor import BrokenCall, IncompleteCall, TextCursor, in_name
from specdec.chat.arguments.values import Parameter, all_in_order, parameters_of
from specdec.chat.arguments.whole_calls import Call, WholeCallReader
from specdec.chat.lark import LarkWriter, joined, one_of
from specdec.chat.tools import Tool


@dataclass(frozen=True)
class TaggedFormat:
    """A format of tags.  before_name, after_name: around the function's name.

    before_key, after_key: around a parameter's name; the latter reaches up to its value.  end_value: after a value.
    end_call: after the last one.  Between these a grammar has one line break, and a reader takes any blanks.
    """

    name: str
    before_name: str
    after_name: str
    before_key: str
    after_key: tuple[str, ...]
    end_value: str
    end_call: tuple[str, ...]
    lines: bool = False  # whether a value stands on lines of its own
    at_start: bool = False
    opening: str = "<tool_call>"
    keeps_marker: bool = False

    def markers(self, tools: Sequence[Tool]) -> tuple[str, ...]:
        return (self.opening,)

    def after(self, tools: Sequence[Tool], several: bool, lark: LarkWriter) -> str:
        call = lark.named(one_of([self._call(tool, lark) for tool in tools]), "call")
        again = joined(lark.text("\n" + self.opening), call)
        return joined(call, f"({again})*") if several else call

    def _call(self, tool: Tool, lark: LarkWriter) -> str:
        parameters = parameters_of(tool)
        self._check(tool, parameters)
        line = "\n" if self.lines else ""
        written = [
            joined(
                lark.text(self.before_key + each.name + "\n".join(self.after_key) + line),
                each.expression(line, self.end_value, lark),
                lark.text("\n"),
            )
            for each in parameters
        ]
        begin = lark.text(self.before_name + tool.name + self.after_name + "\n")
        arguments = all_in_order(parameters, written, "", lark)
        return lark.named(joined(begin, arguments, lark.text("\n".join(self.end_call))), "call")

    def _check(self, tool: Tool, parameters: Sequence[Parameter]) -> None:
        """ValueError for names and choices in which a mark of the format would end them too early."""
        for each in parameters:
            for text, mark in ((each.name, self.after_key[0]), *((choice, self.end_value) for choice in each.choices or ())):
                if mark in text:
                    raise ValueError(
                        f"the parameter {each.name[:100]!r} of {tool.name!r} holds {mark!r} in {text[:100]!r}, with which this "
                        "model's format of calls ends such a text; nearest thing that works: another text"
                    )

    def reader(self, tools: Sequence[Tool], marker: str) -> WholeCallReader:
        known = {tool.name: {each.name: each for each in parameters_of(tool)} for tool in tools}

        def next_call(cursor: TextCursor, count: int) -> Call | None:
            return self._read(cursor, count, known)

        return WholeCallReader(next_call)

    def _read(self, cursor: TextCursor, count: int, known: dict[str, dict[str, Parameter]]) -> Call | None:
        cursor.blanks()
        if count:
            if not cursor.starts(self.opening):
                return None
            cursor.take(self.opening)
            cursor.blanks()
        cursor.take(self.before_name.lstrip())
        name = cursor.span(in_name)
        if name not in known:
            raise BrokenCall
        cursor.take(self.after_name)
        arguments = {}
        while True:
            cursor.blanks()
            if _comes(cursor, self.before_key, self.end_call[0]):
                break
            cursor.take(self.before_key)
            key = cursor.until(self.after_key[0])
            for mark in self.after_key[1:]:
                cursor.blanks()
                cursor.take(mark)
            text = cursor.until(self.end_value)
            if self.lines:
                text = text.removeprefix("\n").removesuffix("\n")
            if key not in known[name]:
                raise BrokenCall
            try:
                arguments[key] = known[name][key].value_of(text)
            except ValueError:
                raise BrokenCall from None
        for mark in self.end_call:
            cursor.blanks()
            cursor.take(mark)
        return name, arguments


def _comes(cursor: TextCursor, other: str, literal: str) -> bool:
    """Whether a text comes next, where it or another one is expected."""
    try:
        return cursor.starts(literal)
    except IncompleteCall:
        if cursor.text.startswith(other, cursor.place):
            return False
        raise


GLM = TaggedFormat("glm45", "", "", "<arg_key>", ("</arg_key>", "<arg_value>"), "</arg_value>", ("</tool_call>",))
QWEN_XML = TaggedFormat(
    "qwen3_xml", "\n<function=", ">", "<parameter=", (">",), "</parameter>", ("</function>", "</tool_call>"), lines=True
)
