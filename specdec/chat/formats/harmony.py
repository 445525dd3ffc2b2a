"""gpt-oss: an answer is a list of messages on channels, by OpenAI's published guide to the format.

The template writes `<|start|>assistant`, and the answer goes on from there: a header up to `<|message|>`, which names the
channel and perhaps a recipient, and a text up to the message's end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from specdec.chat.lark import ANY_TEXT, LarkWriter, joined, one_of
from specdec.chat.plan import ReplyPlan, SpecialTokens, answer_expression, held_to
from specdec.chat.said import Said, new_id
from specdec.chat.scan import MarkScanner
from specdec.chat.tools import Tool, ToolRules
from specdec.checks import about
from specdec.config import SamplingParams
from specdec.grammar.wait import Wait

NAME, SIGN = "harmony", "<|channel|>"
CHANNEL, MESSAGE, START = "<|channel|>", "<|message|>", "<|start|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>", START)
RECIPIENT, ON_CHANNEL = re.compile(r"to=functions\.([a-zA-Z0-9_.-]+)"), re.compile(r"<\|channel\|>\s*(\w+)")
CALL = "<|channel|>commentary to=functions."
MARKERS = (CALL, "<|start|>assistant to=functions.", "<|channel|>analysis to=functions.")
JSON = "<|constrain|>json"


class HarmonyReader:
    """Reads one answer.  tools: those that may be called."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._names = {tool.name for tool in tools}
        self._message, self._ends = MarkScanner([MESSAGE]), MarkScanner(ENDS)
        self._text, self._kind = "", ""  # what was not said yet; of the message's text, empty within a header
        self._calls, self._thoughts = 0, 0

    def feed(self, text: str) -> list[Said]:
        said = list[Said]()
        self._text += text
        while self._step(said, False):
            pass
        return said

    def finish(self) -> list[Said]:
        said = list[Said]()
        while self._step(said, True):
            pass
        if not self._kind and CHANNEL not in self._text and not self._text.startswith(START):
            self._say(said, "content", self._text)  # an answer without any header
        self._text = ""
        return said

    def _step(self, said: list[Said], is_all: bool) -> bool:
        """Reads to the end of a header or of a message's text.  False: that has not come."""
        scanner = self._ends if self._kind else self._message
        if (found := scanner.find(self._text)) is None:
            if self._kind:
                held = 0 if is_all else scanner.held_back(self._text)
                certain = self._text[: len(self._text) - held]
                self._say(said, self._kind, certain)
                self._text = self._text[len(certain) :]
            return False
        place, mark = found
        before, self._text = self._text[:place], self._text[place + len(mark) :]
        if self._kind:
            self._say(said, self._kind, before)
            self._calls += self._kind == "arguments"
            self._kind = ""
        else:
            self._begin(said, before)
        return True

    def _begin(self, said: list[Said], header: str) -> None:
        recipient, channel = RECIPIENT.search(header), ON_CHANNEL.search(header)
        if recipient is not None and recipient[1] in self._names:
            self._kind = "arguments"
            said.append(Said("call", recipient[1], self._calls, new_id()))
        elif channel is not None and channel[1] == "analysis":
            self._kind = "thought"
            if self._thoughts:
                self._say(said, "thought", "\n")
            self._thoughts += 1
        else:
            self._kind = "content"

    def _say(self, said: list[Said], kind: str, text: str) -> None:
        if text:
            said.append(Said(kind, text, self._calls if kind == "arguments" else 0))  # type: ignore[arg-type]


def plan_channels(sampling: SamplingParams, rules: ToolRules, special: SpecialTokens) -> ReplyPlan:
    """The plan of a request.  A thought is part of the grammar where that holds from the first token on.

    ValueError, marked with `tools`, if there is none.
    """
    tools = rules.callable_tools

    def reader() -> HarmonyReader:
        return HarmonyReader(tools)

    if not tools and sampling.grammar_rule is None:
        return ReplyPlan(sampling, None, reader)
    lark = LarkWriter(special.named())
    wanted = list[str]()
    with about("tools"):
        if rules.choice == "auto" and tools and sampling.grammar_rule is None:
            return ReplyPlan(held_to(sampling, lark.written(_call(tools, lark))), Wait(None, MARKERS), reader)
        if tools:
            wanted.append(joined(lark.text(CALL), _call(tools, lark)))
    if rules.choice != "required":
        wanted.append(
            joined(lark.text("<|channel|>final<|message|>"), answer_expression(sampling, lark, "this model's channels"))
        )
    thought = joined(
        lark.text("<|channel|>analysis<|message|>"), lark.named(f"/{ANY_TEXT}/", "TEXT"), lark.text("<|end|><|start|>assistant")
    )
    return ReplyPlan(held_to(sampling, lark.written(joined(f"({thought})?", one_of(wanted)))), None, reader)


def _call(tools: Sequence[Tool], lark: LarkWriter) -> str:
    """What follows a marker: a name, the rest of the header, and the arguments."""
    header = lark.named(
        one_of(
            lark.text(text)
            for text in (
                f" {JSON}{MESSAGE}",
                f"{CHANNEL}commentary {JSON}{MESSAGE}",
                f"{CHANNEL}commentary json{MESSAGE}",
                MESSAGE,
            )
        ),
        "header",
    )
    return lark.named(one_of(joined(lark.text(tool.name), header, lark.json(tool.parameters)) for tool in tools), "call")
