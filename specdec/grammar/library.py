"""The library that reads schemas, expressions and grammars: llguidance, an optional dependency.

This module checks what users ask for, and makes matchers of it.  It is the only one that knows the library.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from specdec.checks import about
from specdec.config import GrammarKind
from specdec.grammar.depth import check_depth
from specdec.grammar.keywords import GUIDANCE
from specdec.grammar.late import LateMatcher
from specdec.grammar.matcher import Matcher
from specdec.grammar.wait import TokenTexts, Wait, WaitPlan
from specdec.grammar.wait_table import WaitTable, wait_table
from specdec.steps import Grammar

MAX_REASON = 500  # characters of what the library says of a fault
MAX_KEPT = 64  # compiled grammars of one decoder; a further one takes the place of the one that was used least recently
# Between two tokens of JSON: a blank, or a line break and an indentation.  Models that were not trained on JSON write blanks
# for ever where any number of them is allowed.  A schema may say otherwise ("x-guidance", see the library).
WHITESPACE = r"( |\r?\n[ \t]{0,32})?"


class Grammars:
    """Compiles grammars for one tokenizer; several threads may ask.

    tokenizer_json: gives the tokenizer in the format of tokenizer.json; ValueError if there is no such tokenizer.
    vocab_size: the target's.  eos_ids: the ids with which the target ends a text.
    """

    def __init__(
        self, tokenizer_json: Callable[[], str], vocab_size: int, eos_ids: Sequence[int], max_kept: int = MAX_KEPT
    ) -> None:
        self._tokenizer_json, self._vocab_size, self._eos_ids = tokenizer_json, vocab_size, tuple(sorted(eos_ids))
        self._tokenizer: Any = None
        self._max_kept = max_kept
        self._compiled: OrderedDict[tuple[GrammarKind, str], Any] = OrderedDict()
        self._special: dict[str, int] | None = None
        self._vocabulary: TokenTexts | None = None
        self._plans: dict[Wait, WaitPlan] = {}
        self._tables: dict[WaitPlan, WaitTable | None] = {}
        self._lock, self._reading, self._preparing = threading.Lock(), threading.Lock(), threading.Lock()

    def check(self, kind: GrammarKind, text: str) -> None:
        """ValueError if no text of the model can be held to the grammar, with the library's reason."""
        with about(kind):
            self.check_library(kind)
            self._compile(kind, text)

    def check_library(self, what: str) -> None:
        """ValueError if no text can be held to any grammar here.  what: what needs that."""
        with about(what):
            if importlib.util.find_spec("llguidance") is None:
                raise ValueError(
                    f"{what} needs the library llguidance, which is not installed; nearest thing that works: "
                    "pip install 'specdec-runtime[grammar]'"
                )
            if not self._eos_ids:
                raise ValueError(f"{what} needs a target whose config names an eos_token_id, with which the text can end")

    def prepare(self, wait: Wait) -> WaitTable | None:
        """Reads the vocabulary for texts that wait so, if nobody has: it takes long, and other texts wait for `matcher`.

        With the table the device can follow such texts; None: it can't.  ValueError if no text can wait so.
        """
        plan = self._plan(wait)
        with self._preparing:
            if plan not in self._tables:
                if len(self._tables) >= self._max_kept:
                    self._tables.clear()
                self._tables[plan] = wait_table(plan)
            return self._tables[plan]

    def matcher(self, grammar: Grammar) -> Matcher | LateMatcher:
        """A matcher at the beginning of a text.  grammar: one that passed `check`."""
        compiled = self._compile(grammar.kind, grammar.text)
        make = partial(self._matcher, compiled, grammar.kind, grammar.text, grammar.ends)
        return make() if grammar.wait is None else LateMatcher(make, self._plan(grammar.wait), grammar.ends)

    def special_tokens(self) -> dict[str, int]:
        """The ids of tokens that a grammar names by their id, because no text of theirs is what the library takes them for.

        ValueError if the tokenizer can't be read.
        """
        if self._special is None:
            inner = self._read_tokenizer("grammar")
            ids = [token for token in range(self._vocab_size) if inner.is_special_token(token)]
            self._special = {inner.decode_bytes([token]).decode(errors="replace"): token for token in reversed(ids)}
        return self._special

    def _plan(self, wait: Wait) -> WaitPlan:
        """What tokens do while a text waits for its grammar.  A plan remembers what it has found, so it is kept."""
        if (found := self._plans.get(wait)) is not None:
            return found
        inner = self._read_tokenizer("grammar")
        with self._reading:  # and not the lock, for which texts that run would wait
            if self._vocabulary is None:
                self._vocabulary = TokenTexts([inner.decode_bytes([token]) for token in range(self._vocab_size)])
            if wait not in self._plans:
                if len(self._plans) >= self._max_kept:
                    self._plans.clear()
                self._plans[wait] = WaitPlan(wait, self._vocabulary)
            return self._plans[wait]

    def _matcher(self, compiled: Any, kind: GrammarKind, text: str, ends: Sequence[int]) -> Matcher:
        """Copies of a compiled grammar share what the library learns of it, and what counts towards its limits."""

        def renew() -> Any:
            with self._lock:
                if self._compiled.get((kind, text)) is compiled:
                    del self._compiled[kind, text]  # a copy of it has failed, and so would all others
            return self._build(kind, text)

        return Matcher(compiled.deep_copy, renew, ends, self._vocab_size)

    def left_after(self, grammar: Grammar | None, tokens: Sequence[int]) -> tuple[list[int], str]:
        """The tokens that a grammar allows after others, and what the library said if it failed there; without one, all."""
        if grammar is None:
            return list(range(self._vocab_size)), ""
        return _left(self.matcher(grammar), tokens, self._vocab_size)

    def _compile(self, kind: GrammarKind, text: str) -> Any:
        """The library's matcher at the beginning of a text, which nobody moves on."""
        with self._lock:
            if (kind, text) in self._compiled:
                self._compiled.move_to_end((kind, text))
                return self._compiled[kind, text]
        compiled = self._new(kind, text)  # outside of the lock: a large grammar takes a second, and the engine must not wait
        with self._lock:
            self._compiled[kind, text] = compiled
            if len(self._compiled) > self._max_kept:
                self._compiled.popitem(last=False)
        return compiled

    def _lenient_hint(self, kind: GrammarKind, text: str) -> str:
        """What makes a refused schema work, where leaving out what the library can't hold a text to is enough."""
        schema = json.loads(text) if kind == "json_schema" else {}
        options = schema.get(GUIDANCE, {})
        if kind != "json_schema" or options.get("lenient"):
            return ""
        lenient = {**schema, GUIDANCE: {**options, "lenient": True}}
        if self._build(kind, json.dumps(lenient, ensure_ascii=False)).is_error():
            return ""
        return f'; nearest setting that works: "{GUIDANCE}": {{"lenient": true}} in the schema, which leaves such keywords out'

    def _new(self, kind: GrammarKind, text: str) -> Any:
        """`_build`, after a look at whether any text obeys."""
        compiled = self._build(kind, text)
        if compiled.is_error():
            said, hint = cut(compiled.get_error()), self._lenient_hint(kind, text)
            raise ValueError(f"{kind} can't be used: {said}; expected what llguidance supports{hint}")
        # The library finds that a grammar has no text, or is too large for it, only when it is asked for tokens.
        copy = compiled.deep_copy  # for renewal too: nothing else has looked at it yet
        left, reason = _left(Matcher(copy, copy, self._eos_ids, self._vocab_size), (), self._vocab_size)
        goes_on = [token for token in left if token not in self._eos_ids][:1]
        if goes_on:
            left, reason = _left(Matcher(copy, copy, self._eos_ids, self._vocab_size), goes_on, self._vocab_size)
        if not left:
            raise ValueError(
                f"{kind} can't be used: no text begins in the way it asks for, or it is too large; llguidance says: "
                f"{cut(reason)}"
            )
        return compiled

    def _build(self, kind: GrammarKind, text: str) -> Any:
        """The library's matcher at the beginning of a text, which shares nothing with others."""
        from llguidance import LLMatcher, LLParserLimits, grammar_from

        check_depth(kind, text)
        try:
            if kind == "json_schema":
                source = LLMatcher.grammar_from_json_schema(text, defaults=_defaults(text))
            else:
                source = grammar_from(kind, text)
        except ValueError as error:
            raise ValueError(f"{kind} can't be read: {cut(error)}") from None
        limits = LLParserLimits(verbose_errors=False)
        return LLMatcher(self._read_tokenizer(kind), source, log_level=0, limits=limits)

    def _read_tokenizer(self, kind: GrammarKind) -> Any:
        """The library's own form of the tokenizer, which takes about a second for 100,000 tokens."""
        from llguidance import LLTokenizer

        with self._reading:
            if self._tokenizer is None:
                try:
                    source = _within(self._tokenizer_json(), self._vocab_size)
                    self._tokenizer = LLTokenizer(source, n_vocab=self._vocab_size, eos_token=self._eos_ids[0])
                except Exception as error:  # of any kind: the library's own checks of what the file holds
                    raise ValueError(
                        f"{kind} needs a tokenizer that llguidance can read, of at most {self._vocab_size} ids: {error}"
                    ) from error
        return self._tokenizer


def cut(reason: object) -> str:
    """What the library says, on one line: it quotes what it was given."""
    said = " ".join(str(reason)[: 2 * MAX_REASON].split())
    return said if len(said) <= MAX_REASON else said[:MAX_REASON] + "..."


def _defaults(schema: str) -> dict[str, Any]:
    """What holds where a schema's own x-guidance does not say: nothing about blanks where it says anything about them."""
    try:
        said = json.loads(schema).get("x-guidance")
    except (ValueError, AttributeError):  # true and false are schemas, too; what is no schema the library refuses
        said = None
    is_said = isinstance(said, dict) and any(key.startswith("whitespace") for key in said)
    return {} if is_said else {"whitespace_pattern": WHITESPACE}


def _within(tokenizer: str, size: int) -> str:
    """A tokenizer.json without the added tokens that the model has no logits for, which no text can have."""
    read = json.loads(tokenizer)
    read["added_tokens"] = [token for token in read.get("added_tokens", []) if token["id"] < size]
    return json.dumps(read)


def _left(matcher: Matcher | LateMatcher, tokens: Sequence[int], vocab_size: int) -> tuple[list[int], str]:
    """The tokens that a matcher at the beginning of a text allows after others, and what the library said if it failed."""
    words_X = np.zeros((1, -(-vocab_size // 32)), np.int32)
    for token in tokens:  # the masks in between are made as they were for the text, since they move the library's limits
        matcher.fill(words_X)
        matcher.take([token])
    matcher.fill(words_X)
    left = np.nonzero(np.unpackbits(words_X.view(np.uint8), bitorder="little", count=vocab_size))[0].tolist()
    return left, matcher.reason
