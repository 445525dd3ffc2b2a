"""What is known of a model's answers, and what that makes of one request: its grammar, and how its answer is read.

docs/SERVING.md says which formats there are.  This module knows no model; a decoder tells it of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.chat.formats import harmony
from specdec.chat.formats.table import FORMATS, THOUGHTS, format_of, thoughts_of
from specdec.chat.lark import LarkWriter, joined
from specdec.chat.plan import ReplyPlan, SpecialTokens, answer_expression, held_to
from specdec.chat.reply import MarkedReader, ReplyReader
from specdec.chat.said import ToolFormat
from specdec.chat.tools import ToolRules
from specdec.checks import about
from specdec.config import SamplingParams
from specdec.grammar.wait import Thought, Wait

BLANKS = " \t\r\n"
AUTO, NONE = "auto", "none"
TOOL_PARSERS = (AUTO, NONE, *FORMATS, harmony.NAME)
REASONING_PARSERS = (AUTO, NONE, *THOUGHTS, harmony.NAME)


@dataclass(frozen=True)
class ReplyForm:
    """How a model writes calls and thoughts.  None: in no way that is known.

    takes_tools: whether its chat template tells the model of tools.  has_channels: whether answers are messages on channels,
    which say what is a call and what is a thought.
    """

    tools: ToolFormat | None = None
    thought: Thought | None = None
    takes_tools: bool = False
    has_channels: bool = False

    @classmethod
    def of(cls, template: str | None, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> ReplyForm:
        """What a chat template's text tells, unless the parsers are named."""
        text = template or ""
        tools = format_of(text) if tool_parser == AUTO else tool_parser
        thoughts = thoughts_of(text) if reasoning_parser == AUTO else reasoning_parser
        has_channels = harmony.NAME in (tools, thoughts)
        return cls(FORMATS.get(tools or ""), THOUGHTS.get(thoughts or ""), "tools" in text, has_channels)

    def plan(self, sampling: SamplingParams, rules: ToolRules, before: str, special: SpecialTokens) -> ReplyPlan:
        """The plan of a request.  before: the end of its prompt's text.  ValueError, marked with `tools`, if there is none."""
        tools = rules.callable_tools
        if tools:
            self._check()
        if self.has_channels:
            return harmony.plan_channels(sampling, rules, special)
        thought = self._thought(before)
        if not tools and thought is None:
            return ReplyPlan(sampling)
        form = self.tools if tools else None

        def reader() -> ReplyReader:
            return MarkedReader(thought, form, tools, special.hidden)

        wait = None if thought is None else Wait(thought)
        if form is None:
            return ReplyPlan(sampling, wait if sampling.grammar_rule is not None else None, reader)
        with about("tools"):
            lark = LarkWriter(special.named())
            calls = form.after(tools, rules.several, lark)
            markers = form.markers(tools)
            whole = calls if form.keeps_marker else joined(lark.text(markers[0]), calls)
            if rules.choice == "required":
                grammar = lark.written(whole)
            elif sampling.grammar_rule is not None:
                grammar = lark.written(f"{whole} | {answer_expression(sampling, lark, 'tools with tool_choice auto')}")
            else:
                grammar, wait = lark.written(calls), Wait(thought, markers, form.at_start, form.keeps_marker)
        return ReplyPlan(held_to(sampling, grammar), wait, reader)

    def _check(self) -> None:
        """ValueError if no tool can be called."""
        with about("tools"):
            if self.tools is None and not self.has_channels:
                known = ", ".join(FORMATS)
                raise ValueError(
                    f"tools can't be called: the model's chat template tells of no known format of calls; nearest thing that "
                    f"works: tool_parser (--tool-parser of `specdec serve`), one of {known}"
                )
            if not self.takes_tools:
                raise ValueError(
                    "tools can't be called: the model's chat template has no place for them; nearest thing that works: "
                    "chat_template (--chat-template FILE), a template that writes `tools`"
                )

    def _thought(self, before: str) -> Thought | None:
        """The marks of a thought that the answer may begin with, or in which it begins; None: the model writes none."""
        if self.thought is None:
            return None
        end = before.rstrip(BLANKS)
        if end.endswith(self.thought.close):  # the template has closed one, so that there is none
            return None
        return self.thought._replace(is_open=end.endswith(self.thought.open))
