"""Masks of draft trees against brute force, and what is said of schemas, expressions and grammars that can't be used.

Shapes: N nodes, X words of a mask.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from typing import Any

import numpy as np
import pytest
from llguidance import LLMatcher, LLParserLimits, grammar_from
from toolkit.checkpoints.grammars import EOS, RULES, STOP, V, allowed, first_id, mask_after, tokenizer_json
from toolkit.checkpoints.tokenizers import byte_tokenizer, sentencepiece_tokenizer

from specdec.config import GrammarKind
from specdec.grammar.library import MAX_KEPT, Grammars
from specdec.grammar.matcher import Matcher
from specdec.grammar.tree_completion import TreeCompletion
from specdec.steps import Grammar


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(tokenizer_json, V, [EOS])


@pytest.mark.parametrize("kind", list(RULES))
def test_each_node_s_mask_is_that_of_its_own_path(grammars: Grammars, kind: GrammarKind) -> None:
    """Random texts; trees of tokens that the grammar allows, of any tokens and of ids out of range.  Keeps out: a walk that
    does not come back, the mask of a sibling, and masks that ban everything at nodes that nobody reads."""
    draw, matcher, text = random.Random(1), grammars.matcher(Grammar(kind, RULES[kind], (STOP, EOS))), []
    ended = False
    for _ in range(25):
        tokens, parents, paths = [text[-1] if text else 0], [0], [[]]
        for node in range(1, 10):
            parent = draw.randrange(node)
            fitting = allowed(mask_after(grammars, kind, text + paths[parent]))
            token = draw.choice(fitting) if draw.random() < 0.7 else draw.choice([-1, V + 5, *range(V)])
            tokens, parents, paths = [*tokens, token], [*parents, parent], [*paths, [*paths[parent], token]]
        masks_NX = np.zeros((10, V // 32), np.int32)
        matcher.fill(masks_NX, tokens, parents)
        for mask_X, path in zip(masks_NX, paths, strict=True):
            assert (mask_X == mask_after(grammars, kind, text + path)).all(), (text, path)
        token = draw.choice(allowed(masks_NX[0]))
        matcher.take([token])
        text.append(token)
        ended = ended or token == EOS
    assert ended or len(text) == 25


def test_the_end_is_where_the_text_is_complete(grammars: Grammars) -> None:
    """Keeps out: an EOS in the middle; a complete text that can't end; a stop id that only the grammar's own text may hold."""
    ids = byte_tokenizer(300).encode("ab", add_special_tokens=False)
    before, after = (set(allowed(mask_after(grammars, "regex", ids[:n]))) for n in (1, len(ids)))
    assert not {EOS, STOP} & before and {EOS, STOP} < after
    for over in ([*ids, EOS], [EOS], [*ids, STOP, 5]):  # after the end, and after a token that breaks the grammar
        assert (mask_after(grammars, "regex", over) == -1).all()


def test_compiled_grammars_are_kept_and_forgotten(grammars: Grammars) -> None:
    """Keeps out: each of n choices compiled anew, and a server whose memory grows with every schema that it is sent."""
    for number in range(MAX_KEPT + 5):
        grammars.check("regex", f"a{{{number + 1}}}")
    assert len(grammars._compiled) == MAX_KEPT


def test_the_grammar_that_was_used_least_recently_goes() -> None:
    """Keeps out: a schema that every request has, and that is compiled anew for each of them because others come between."""
    made: list[str] = []

    class Noted(Grammars):
        def _new(self, kind: GrammarKind, text: str) -> None:
            made.append(text)

    grammars = Noted(tokenizer_json, V, [EOS], max_kept=2)
    for text in "abacab":
        grammars.check("regex", text)
    assert made == ["a", "b", "c", "b"]


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("regex", "(a", "regex can't be used: .*unclosed group"),
        ("grammar", "start: foo", 'grammar can\'t be used: .*unknown name: "foo"'),
        ("json_schema", '{"type": "strin"}', "json_schema can't be used: .*strin"),
        ("json_schema", '{"type": "string", "minLength": 5, "maxLength": 2}', "minLength .5. is greater than maxLength"),
        (
            "json_schema",
            '{"$ref": "#"}',
            "json_schema can't be used: no text begins in the way it asks for.* llguidance says: ",
        ),
        ("regex", "a{800000}", "regex can't be used: .* or it is too large; llguidance says: .*too many expressions"),
        ("json_schema", '{"not": {}}', "json_schema can't be used: .*not"),
        (
            "json_schema",
            '{"type": "array", "uniqueItems": true}',
            "uniqueItems.*; nearest .* works: .x-guidance.: ..lenient.: true",
        ),
        ("json_schema", '{"pattern": "(?=a)"}', "look-behind, is not supported; expected what llguidance supports$"),
    ],
)
def test_the_library_s_reason_is_quoted(grammars: Grammars, kind: GrammarKind, text: str, said: str) -> None:
    """Keeps out: a request that fails later, or a grammar that is understood in another way."""
    with pytest.raises(ValueError, match=said):
        grammars.check(kind, text)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: an import error without the extra's name; a text that can't end; a tokenizer that is larger than the model."""
    source = sentencepiece_tokenizer().backend_tokenizer.to_str()
    with pytest.raises(ValueError, match="regex needs a target whose config names an eos_token_id"):
        Grammars(lambda: source, V, []).check("regex", "a")
    with pytest.raises(ValueError, match="regex needs a tokenizer that llguidance can read, of at most 32 ids: "):
        Grammars(lambda: source, 32, [2]).check("regex", "a")
    with pytest.raises(ValueError, match="regex needs a tokenizer that llguidance can read, of at most 384 ids: "):
        Grammars(lambda: "{}", V, [2]).check("regex", "a")
    monkeypatch.setitem(sys.modules, "llguidance", None)  # Python then finds no such module
    with pytest.raises(ValueError, match=r"regex needs the library llguidance, .* pip install 'specdec-runtime\[grammar\]'"):
        Grammars(lambda: source, V, [2]).check("regex", "a")
    assert "llguidance" in sys.modules


class Fragile:
    """The library's matcher, which reaches a limit after one token and does not survive that."""

    def __init__(self, inner: Any, token: int) -> None:
        self.inner, self.token, self.last, self.is_dead = inner, token, -1, False

    def try_consume_tokens(self, tokens: list[int]) -> int:
        self.last = tokens[0]
        return 0 if self.is_dead else self.inner.try_consume_tokens(tokens)

    def validate_tokens(self, tokens: list[int]) -> int:
        if self.token in tokens:
            self.last = self.token
        return 0 if self.is_error() else self.inner.validate_tokens(tokens)

    def rollback(self, tokens: int) -> bool:
        return not self.is_error() and self.inner.rollback(tokens)

    def is_error(self) -> bool:
        self.is_dead = self.is_dead or self.last == self.token
        return self.is_dead

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_a_limit_in_a_draft_leaves_the_text(grammars: Grammars) -> None:
    """Keeps out: a draft that nobody accepts, and that makes the request fail."""
    compiled, (a, b, comma) = grammars._compile("grammar", RULES["grammar"]), (first_id(text) for text in "ab,")

    def start() -> Any:
        return Fragile(compiled.deep_copy(), b)

    matcher, masks_NX = Matcher(start, start, (EOS,), V), np.zeros((4, V // 32), np.int32)
    matcher.take([a])
    matcher.fill(masks_NX, [a, a, b, b], [0, 0, 0, 1])
    assert matcher.is_alone and not matcher.is_stuck and (masks_NX[1:] == -1).all()
    for text in ([a], [a, comma]):
        want = mask_after(grammars, "grammar", text)
        matcher.fill(masks_NX, [0, b, b, b], [0, 0, 1, 2])
        assert (masks_NX[0] | mask_of(STOP) == want | mask_of(STOP)).all() and (masks_NX[1:] == -1).all()
        matcher.take([comma])
    matcher = Matcher(start, start, (EOS,), V)
    matcher.take([a])
    tokens, parents = TreeCompletion(matcher, [a, b, a, comma], [0, 0, 1, 1], 2, False).run()
    assert matcher.is_alone and (tokens, parents) == ([a] * 4, [0, 0, 1, 1]), "nothing that can be accepted"


def test_a_text_at_which_the_library_fails_goes_nowhere(grammars: Grammars) -> None:
    """Keeps out: free text after a limit that the library reaches; a failure in one text that reaches others of its grammar."""
    token, end, rule = first_id("a"), first_id("x"), Grammar("regex", "x|a{1000000}", (EOS,))
    plain, tree, other = (grammars.matcher(rule) for _ in range(3))
    one_NX, three_NX = np.ones((1, V // 32), np.int32), np.ones((3, V // 32), np.int32)
    for matcher in (plain, tree):
        matcher.fill(one_NX)
    tree.fill(three_NX, [0, token, token], [0, 0, 1])
    assert tree.is_alone and {token, end} <= {*allowed(three_NX[0])}, "a draft alone has failed"
    for _ in range(2):
        plain.take([token])
        plain.fill(one_NX)
    assert plain.is_stuck and "too many expressions" in plain.reason and not one_NX.any()
    for matcher in (other, grammars.matcher(rule)):
        matcher.fill(one_NX)
        assert {token, end} <= {*allowed(one_NX[0])}
        matcher.take([end])
        matcher.fill(one_NX)
        assert allowed(one_NX[0]) == [EOS]
    assert grammars.left_after(rule, [token, token]) == ([], plain.reason)


@pytest.mark.parametrize("limit", ["step_lexer_fuel", "max_lexer_states"])
def test_no_draft_fails_a_text_that_plain_decoding_finishes(grammars: Grammars, limit: str) -> None:
    """Random texts near the library's limits, with random drafts around them, against matchers that see the texts alone."""
    grammars.check("regex", "a")
    draw, texts, alone = random.Random(0), 0, 0
    for most, rule in itertools.product(
        (40, 80, 130, 220), (r"((ab){1,40}|(ac){1,40})+x", "([a-c]{1,12}d){1,40}", "a{99}|(b|ab){3,90}c")
    ):

        def build(most: int = most, rule: str = rule) -> Any:
            limits = LLParserLimits(verbose_errors=False, **{limit: most})
            return LLMatcher(grammars._tokenizer, grammar_from("regex", rule), log_level=0, limits=limits)

        for _ in range(4):
            text, allowed_at = plain_text(draw, Matcher(build, build, (EOS,), V))
            matcher = Matcher(build().deep_copy, build, (EOS,), V)
            follow(draw, matcher, text, allowed_at)
            texts, alone = texts + len(text) // 6, alone + matcher.is_alone
    assert texts and alone, "texts that go on, and drafts that reach a limit"


def plain_text(draw: random.Random, matcher: Matcher) -> tuple[list[int], list[list[int]]]:
    """A random text until a limit, of at most 16 tokens, and what is allowed at each place."""
    text, allowed_at, mask_1X = list[int](), list[list[int]](), np.zeros((1, V // 32), np.int32)
    while len(text) < 16 and not matcher.is_over:
        matcher.fill(mask_1X)
        if not mask_1X.any():
            break
        allowed_at.append(allowed(mask_1X[0]))
        text.append(draw.choice([token for token in allowed_at[-1] if token != EOS] or [EOS]))
        matcher.take(text[-1:])
    return text, allowed_at


def follow(draw: random.Random, matcher: Matcher, text: list[int], allowed_at: list[list[int]]) -> None:
    """Leads a matcher along a text as rounds do, with trees in which it is one path, and asserts that it can be written."""
    at, masks_NX = 0, np.zeros((6, V // 32), np.int32)
    while at < len(text):
        ahead = text[at : at + draw.randrange(3)]
        tokens, parents = [0, *ahead], [0, *range(len(ahead))]
        while len(tokens) < 6:
            above, token = draw.randrange(len(tokens)), draw.choice(allowed_at[min(at + 1, len(text) - 1)])
            if (above, token) not in zip(parents[1:], tokens[1:], strict=True):
                tokens, parents = [*tokens, token], [*parents, above]
        if not matcher.is_alone:
            tokens, parents = TreeCompletion(matcher, tokens, parents, 5, False).run()
        matcher.fill(masks_NX, tokens, parents)
        node, start = 0, at
        while True:
            want = text[at]
            assert want in allowed(masks_NX[node]), (text[:at], matcher.reason)
            at, next_ = at + 1, [i for i in range(1, 6) if parents[i] == node and tokens[i] == want]
            if matcher.is_alone or not next_ or at == len(text):
                break
            node = next_[0]
        matcher.take(text[start:at])
        assert not matcher.is_stuck or at == len(text)


def mask_of(token: int) -> np.ndarray:
    mask_X = np.zeros(V // 32, np.int32)
    mask_X[token // 32] = 1 << token % 32
    return mask_X


@pytest.mark.parametrize("said", [{"whitespace_flexible": False}, {"whitespace_pattern": ""}, {}])
def test_a_schema_s_own_word_on_blanks_counts(said: dict[str, Any]) -> None:
    """Keeps out: "whitespace_flexible": false, which our own pattern silenced."""
    grammars, blank = Grammars(tokenizer_json, V, [EOS]), first_id(" ")
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "x-guidance": said})
    left, _ = grammars.left_after(Grammar("json_schema", schema, (EOS,)), [first_id("{")])
    assert (blank in left) == (not said), left


def test_tokens_that_the_model_has_no_logits_for_change_nothing() -> None:
    """Keeps out: three added ids above vocab_size, with which ordinary prompts ran and every schema failed."""
    size = STOP + 1

    def larger() -> str:
        read = json.loads(tokenizer_json())
        more = [dict(read["added_tokens"][-1], id=size + number, content=f"<more {number}>") for number in range(3)]
        return json.dumps(read | {"added_tokens": [*read["added_tokens"], *more]})

    rule = Grammar("json_schema", RULES["json_schema"], (STOP, EOS))
    for tokens in ([], [first_id("{")]):
        one, other = (Grammars(made, size, [EOS]).left_after(rule, tokens) for made in (tokenizer_json, larger))
        assert one == other and one[0]
