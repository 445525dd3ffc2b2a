"""Reads an answer as its text comes, round by round: the thought, the content, and the calls of tools."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from specdec.chat.said import CallReader, Said, ToolCall, ToolFormat
from specdec.chat.scan import MarkScanner
from specdec.chat.tools import Tool
from specdec.grammar.wait import Thought

BLANKS = " \t\r\n"


@dataclass(frozen=True)
class Reply:
    """A whole answer.  thought: None: the model writes none, or wrote none."""

    content: str
    thought: str | None
    calls: tuple[ToolCall, ...]


class ReplyReader(Protocol):
    """Reads one answer."""

    def feed(self, text: str) -> list[Said]:
        """What the answer says with a further piece of its text."""
        ...

    def finish(self) -> list[Said]:
        """What was held back, because more text could have changed it."""
        ...


def read_reply(reader: ReplyReader, text: str) -> Reply:
    """The whole answer of a text.  reader: a fresh one."""
    return gathered([*reader.feed(text), *reader.finish()])


def reply_of(make_reader: Callable[[], ReplyReader] | None, text: str) -> Reply:
    """The whole answer of a text.  make_reader: None: all of the text is content."""
    return Reply(text, None, ()) if make_reader is None else read_reply(make_reader(), text)


def gathered(said: Sequence[Said]) -> Reply:
    """The answer that says all this."""
    content, thought = ("".join(each.text for each in said if each.kind == kind) for kind in ("content", "thought"))
    calls = [each for each in said if each.kind == "call"]
    arguments = ["".join(each.text for each in said if each.kind == "arguments" and each.call == call.call) for call in calls]
    read = tuple(ToolCall(call.text, text, call.id) for call, text in zip(calls, arguments, strict=True))
    return Reply(content, thought or None, read)


class MarkedReader:
    """Reads answers whose thought stands between two marks, and whose calls follow one.

    thought: None: the model writes none.  tools: those that may be called.  hidden: names of special tokens, which are no
    content.  Blanks around a thought, and between content and calls, belong to neither.
    """

    def __init__(
        self, thought: Thought | None, form: ToolFormat | None, tools: Sequence[Tool], hidden: Collection[str] = ()
    ) -> None:
        self._thought, self._form, self._tools = thought, form, tools
        self._markers = form.markers(tools) if form is not None and tools else ()
        self._at_start = form is not None and form.at_start
        within = () if self._at_start else self._markers
        self._hidden = frozenset(hidden) - {*self._markers, *((thought.open, thought.close) if thought is not None else ())}
        self._scanner = MarkScanner({*within, *self._hidden})
        self._close = MarkScanner([thought.close] if thought is not None else [])
        self._phase = self._content_begins
        if thought is not None:
            self._phase = self._thought_goes_on if thought.is_open else self._thought_may_begin
        self._text = ""  # what has come and was not said yet
        self._is_fresh = True  # whether a thought or an answer's content has said nothing yet
        self._calls: CallReader | None = None
        self._marker = ""  # with which the calls begin
        self._called = self._said_calls = 0  # how many calls were said before these, and with them

    def feed(self, text: str) -> list[Said]:
        said = list[Said]()
        self._text += text
        while self._phase(said, False):
            pass
        return said

    def finish(self) -> list[Said]:
        said = list[Said]()
        while self._phase(said, True):
            pass
        return said

    # ---- phases: each says what it can, and whether another phase goes on ----

    def _thought_may_begin(self, said: list[Said], is_all: bool) -> bool:
        assert self._thought is not None
        begin = self._text.lstrip(BLANKS)
        if begin.startswith(self._thought.open):
            self._text, self._phase = begin[len(self._thought.open) :], self._thought_goes_on
            return True
        if self._thought.open.startswith(begin) and not is_all:
            return False
        self._phase = self._content_begins
        return True

    def _thought_goes_on(self, said: list[Said], is_all: bool) -> bool:
        if self._is_fresh:
            self._text = self._text.lstrip(BLANKS)
        if found := self._close.find(self._text):
            place, mark = found
            self._say(said, "thought", self._text[:place].rstrip(BLANKS))
            self._text, self._is_fresh, self._phase = self._text[place + len(mark) :], True, self._answer_begins
            return True
        held = 0 if is_all else self._close.held_back(self._text)
        self._say_most(said, "thought", held, True)
        return False

    def _answer_begins(self, said: list[Said], is_all: bool) -> bool:
        """After a thought."""
        self._text = self._text.lstrip(BLANKS)
        self._phase = self._content_begins
        if not self._text and not is_all:
            self._phase = self._answer_begins
            return False
        return True

    def _content_begins(self, said: list[Said], is_all: bool) -> bool:
        """Looks for a marker that counts here alone."""
        if self._at_start and self._markers:
            begin = self._text.lstrip(BLANKS)
            for marker in self._markers:
                if begin.startswith(marker):
                    return self._begin_calls(begin[len(marker) :], marker)
            if not is_all and any(marker.startswith(begin) for marker in self._markers):
                return False
        self._phase = self._content_goes_on
        return True

    def _content_goes_on(self, said: list[Said], is_all: bool) -> bool:
        if found := self._scanner.find(self._text):
            place, mark = found
            before, after = self._text[:place], self._text[place + len(mark) :]
            if mark in self._hidden:
                self._say(said, "content", before)
                self._text = after
                return True
            self._say(said, "content", before.rstrip(BLANKS))
            return self._begin_calls(after, mark)
        held = 0 if is_all else self._scanner.held_back(self._text)
        self._say_most(said, "content", held, bool(self._markers) and not self._at_start and not is_all)
        return False

    def _calls_go_on(self, said: list[Said], is_all: bool) -> bool:
        assert self._calls is not None
        text, self._text = self._text, ""
        found = self._calls.feed(text)
        is_cut = is_all and self._calls.leftover is None
        if is_all:
            found += self._calls.finish()
        said += [Said(each.kind, each.text, each.call + self._called, each.id) for each in found]
        self._said_calls += sum(each.kind == "call" for each in found)
        if self._calls.leftover is None:
            return False
        self._text = self._calls.leftover
        if is_cut and self._said_calls > self._called:  # within a further call, or the marks after the last one: no content
            self._text = ""
        if self._said_calls == self._called:  # it was no call
            self._say(said, "content", self._marker)
        else:
            self._text = self._text.lstrip(BLANKS)
        self._called, self._calls, self._phase = self._said_calls, None, self._content_goes_on
        return True

    def _begin_calls(self, after: str, marker: str) -> bool:
        assert self._form is not None
        self._text, self._marker, self._phase = after, marker, self._calls_go_on
        self._calls, self._said_calls = self._form.reader(self._tools, marker), self._called
        return True

    # ---- pieces ----

    def _say_most(self, said: list[Said], kind: str, held: int, holds_blanks: bool) -> None:
        """Says the text but for its end: so many characters, and the blanks before them."""
        certain = self._text[: len(self._text) - held]
        if holds_blanks:
            certain = certain.rstrip(BLANKS)
        self._say(said, kind, certain)
        self._text = self._text[len(certain) :]

    def _say(self, said: list[Said], kind: str, text: str) -> None:
        if text:
            self._is_fresh = False
            said.append(Said(kind, text))  # type: ignore[arg-type]
