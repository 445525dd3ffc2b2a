"""From a chat's settings to how its answer is chosen and read, with what a target's tokenizer and grammars say."""

from __future__ import annotations

import json
from collections.abc import Sequence

from specdec.chat.form import AUTO, ReplyForm
from specdec.chat.plan import ReplyPlan, SpecialTokens
from specdec.chat.tools import ToolRules
from specdec.checks import mark
from specdec.config import SamplingParams
from specdec.grammar.library import Grammars
from specdec.prompts.tokenizer import Tokenizer

TAIL = 32  # tokens of a prompt's end, where a template may have opened a thought


def form_of(tokenizer: Tokenizer, tool_parser: str = AUTO, reasoning_parser: str = AUTO) -> ReplyForm:
    """How the target writes calls and thoughts, by its chat template unless the parsers are named."""
    return ReplyForm.of(tokenizer.template, tool_parser, reasoning_parser)


def plan_reply(
    form: ReplyForm, sampling: SamplingParams, rules: ToolRules, ids: Sequence[int], tokenizer: Tokenizer, grammars: Grammars
) -> ReplyPlan:
    """The plan of an answer to a prompt of these ids.

    ValueError, marked with the field that is wrong, if there is none: for a schema that no text can be held to, the tool's.
    """
    special = SpecialTokens(grammars.special_tokens, tokenizer.special_texts)
    if rules.callable_tools:
        grammars.check_library("tools")
    plan = form.plan(sampling, rules, tokenizer.decode_all(ids[-TAIL:]), special)
    if rules.callable_tools and (rule := plan.sampling.grammar_rule) is not None:
        try:
            grammars.check(*rule)
        except ValueError as error:
            raise _named(error, rules, grammars) from None
    return plan


def _named(error: ValueError, rules: ToolRules, grammars: Grammars) -> ValueError:
    """The error of the first tool whose schema alone can't be used, or else of all tools."""
    for index, tool in enumerate(rules.tools):
        if tool in rules.callable_tools:
            try:
                grammars.check("json_schema", json.dumps(tool.parameters))
            except ValueError as fault:
                name = f"tools[{index}].function.parameters"
                said = f"{fault}".removeprefix("json_schema ")
                works = "a smaller schema, or its parts in $defs" if "too large" in said else "a schema without what this names"
                wrong = ValueError(f"{name} {said}; nearest thing that works: {works}")
                mark(wrong, name)
                return wrong
    wrong = ValueError(f"tools can't be called: {error}")
    mark(wrong, "tools")
    return wrong
