"""What is known of a model's answers, and what that makes of one request: its grammar, and how its answer is read.

docs/SERVING.md says which formats there are.  This module knows no model; a decoder tells it of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from specdec.chat.formats.table import FORMATS, THOUGHTS, format_of, thoughts_of
from specdec.chat.lark import LarkWriter, joined
from specdec.chat.reply import MarkedReader, ReplyReader
from specdec.chat.said import ToolFormat
from specdec.chat.tools import ToolRules
from specdec.checks import about
from specdec.config import SamplingParams
from specdec.grammar.wait import Thought, Wait

BLANKS = " \t\r\n"
AUTO, NONE = "auto", "none"
TOOL_PARSERS, REASONING_PARSERS = (AUTO, NONE, *FORMATS), (AUTO, NONE, *THOUGHTS)


@dataclass(frozen=True)
class SpecialTokens:
    """What a tokenizer says of special tokens.  named: those that grammars name by ids.  hidden: names that are no content."""

    named: Callable[[], Mapping[str, int]]
    hidden: Sequence[str] = ()


@dataclass(frozen=True)
class ReplyPlan:
    """How one request's answer is chosen and read.

    sampling: the request's, with the grammar of its calls.  wait: from where on the grammar holds.
    reader: makes a reader of an answer; None: the answer's text is its content.
    """

    sampling: SamplingParams
    wait: Wait | None = None
    reader: Callable[[], ReplyReader] | None = None


@dataclass(frozen=True)
class ReplyForm:
    """How a model writes calls and thoughts.  None: in no way that is known.

    takes_tools: whether its chat template tells the model of tools.
    """

    tools: ToolFormat | None = None
    thought: Thought | None = None
    takes_tools: bool = False

    @classmethod
    def of(cls, template: str | None, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> ReplyForm:
        """What a chat template's text tells, unless the parsers are named."""
        text = template or ""
        tools = format_of(text) if tool_parser == AUTO else tool_parser
        thoughts = thoughts_of(text) if reasoning_parser == AUTO else reasoning_parser
        return cls(FORMATS.get(tools or ""), THOUGHTS.get(thoughts or ""), "tools" in text)

    def plan(self, sampling: SamplingParams, rules: ToolRules, before: str, special: SpecialTokens) -> ReplyPlan:
        """The plan of a request.  before: the end of its prompt's text.  ValueError, marked with `tools`, if there is none."""
        tools = rules.callable_tools
        if tools:
            self._check(rules)
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
            opening = form.markers(tools)
            if rules.choice == "required":
                grammar = lark.written(joined(lark.text(opening[0]), calls))
            elif sampling.grammar_rule is not None:
                grammar = lark.written(f"{joined(lark.text(opening[0]), calls)} | {_answer(sampling, lark)}")
            else:
                grammar, wait = lark.written(calls), Wait(thought, opening, form.at_start)
        free = replace(sampling, json_schema=None, regex=None, grammar=grammar)
        return ReplyPlan(free, wait, reader)

    def _check(self, rules: ToolRules) -> None:
        with about("tools"):
            if self.tools is None:
                known = ", ".join(FORMATS)
                raise ValueError(
                    f"tools can't be called: the model's chat template tells of no known format of calls; nearest thing that "
                    f"works: start the server with --tool-parser, one of {known}"
                )
            if not self.takes_tools:
                raise ValueError(
                    "tools can't be called: the model's chat template has no place for them; nearest thing that works: start "
                    "the server with --chat-template FILE, a template that writes `tools`"
                )

    def _thought(self, before: str) -> Thought | None:
        """The marks of a thought that the answer may begin with, or in which it begins; None: the model writes none."""
        if self.thought is None:
            return None
        return self.thought._replace(is_open=before.rstrip(BLANKS).endswith(self.thought.open))


def _answer(sampling: SamplingParams, lark: LarkWriter) -> str:
    """The expression of what `response_format` says, for an answer that may be calls instead."""
    import json

    if sampling.json_schema is not None:
        schema = sampling.json_schema
        return lark.json(json.loads(schema) if isinstance(schema, str) else schema)
    if sampling.regex is not None:
        return lark.named("/" + sampling.regex.replace("/", "\\/") + "/", "ANSWER")
    raise ValueError(
        "tools with tool_choice 'auto' and a grammar for the text can't be held together; nearest setting that works: a JSON "
        "schema or a regular expression, or tool_choice 'required'"
    )
