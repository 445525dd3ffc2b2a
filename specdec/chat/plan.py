"""What one request's settings make of its answer: its grammar, where that begins to hold, and how the answer is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from specdec.chat.lark import LINES, LarkWriter
from specdec.chat.reply import ReplyReader
from specdec.config import SamplingParams
from specdec.grammar.wait import Wait


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


def held_to(sampling: SamplingParams, grammar: str) -> SamplingParams:
    """The same with this grammar alone."""
    return replace(sampling, json_schema=None, regex=None, grammar=grammar)


def answer_expression(sampling: SamplingParams, lark: LarkWriter, what: str) -> str:
    """The expression of what the content must be.  what: needs it, for the error."""
    if sampling.json_schema is not None:
        schema = sampling.json_schema
        return lark.json(json.loads(schema) if isinstance(schema, str) else schema, LINES)
    if sampling.regex is not None:
        return lark.named("/" + sampling.regex.replace("/", "\\/") + "/", "ANSWER")
    raise ValueError(
        f"{what} and a grammar for the content can't be held together; nearest setting that works: a JSON schema or a regular "
        "expression"
    )
