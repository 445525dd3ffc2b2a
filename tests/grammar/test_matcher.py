"""Masks of draft trees against brute force, and what is said of schemas, expressions and grammars that can't be used.

Shapes: N nodes, X words of a mask.
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import numpy as np
import pytest
from toolkit.checkpoints.tokenizers import byte_tokenizer, sentencepiece_tokenizer

from specdec.config import GrammarKind
from specdec.grammar import library
from specdec.grammar.library import MOST_KEPT, Grammars
from specdec.grammar.matcher import Matcher
from specdec.steps import Grammar

V, EOS, STOP = 384, 300, 301  # the tokenizer has fewer ids than the model, whose matrices are padded
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 4}, "n": {"type": "integer"}, "kind": {"enum": ["a", "bc"]}},
        "required": ["name", "n", "kind"],
        "additionalProperties": False,
    }
)
RULES: dict[GrammarKind, str] = {
    "json_schema": SCHEMA,
    "regex": "(ab|cd[0-9]{1,3}é)+",
    "grammar": 'start: item ("," item)*\nitem: "(" start ")" | /[a-c]+/',
}


def tokenizer_json() -> str:
    tokenizer = byte_tokenizer(300)
    tokenizer.add_special_tokens({"eos_token": "</s>", "pad_token": "<stop>"})
    assert tokenizer.convert_tokens_to_ids(["</s>", "<stop>"]) == [EOS, STOP]
    return tokenizer.backend_tokenizer.to_str()


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(tokenizer_json, V, [EOS])


def allowed(mask_X: np.ndarray) -> list[int]:
    return np.nonzero(np.unpackbits(mask_X.view(np.uint8), bitorder="little"))[0].tolist()


def mask_after(grammars: Grammars, kind: GrammarKind, tokens: list[int]) -> np.ndarray:
    """The mask after the whole text, of a matcher that has seen nothing else."""
    matcher, mask = grammars.matcher(Grammar(kind, RULES[kind], (STOP, EOS))), np.zeros((1, V // 32), np.int32)
    matcher.take(tokens)
    matcher.fill(mask)
    return mask[0]


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
    for number in range(MOST_KEPT + 5):
        grammars.check("regex", f"a{{{number + 1}}}")
    assert len(grammars._compiled) == MOST_KEPT


def test_the_grammar_that_was_used_least_recently_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: a schema that every request has, and that is compiled anew for each of them because others come between."""
    made: list[str] = []
    monkeypatch.setattr(library, "MOST_KEPT", 2)
    monkeypatch.setattr(Grammars, "_new", lambda self, kind, text: made.append(text))
    grammars = Grammars(tokenizer_json, V, [EOS])
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
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
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

    def rollback(self, tokens: int) -> bool:
        return not self.is_dead and self.inner.rollback(tokens)

    def is_error(self) -> bool:
        self.is_dead = self.is_dead or self.last == self.token
        return self.is_dead

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_a_limit_in_one_branch_leaves_the_others(grammars: Grammars) -> None:
    """Keeps out: a draft that nobody accepts, and that makes the request fail."""
    compiled, (a, b, comma) = grammars._compile("grammar", RULES["grammar"]), (first_id(text) for text in "ab,")
    matcher, masks_NX = Matcher(lambda: Fragile(compiled.deep_copy(), b), (EOS,), V), np.zeros((6, V // 32), np.int32)
    matcher.take([a])
    matcher.fill(masks_NX, [a, a, b, b, comma, a], [0, 0, 0, 1, 0, 4])
    for node, path in enumerate(([], [a], None, None, [comma], [comma, a])):
        want = np.zeros(V // 32, np.int32) if path is None else mask_after(grammars, "grammar", [a, *path])
        assert (masks_NX[node] | mask_of(STOP) == want | mask_of(STOP)).all(), node


def test_a_text_at_which_the_library_fails_goes_nowhere(grammars: Grammars) -> None:
    """Keeps out: free text after a limit that the library reaches, in a text and in a tree."""
    token, rule = first_id("a"), Grammar("regex", "x|a{1000000}", (EOS,))
    plain, tree = grammars.matcher(rule), grammars.matcher(rule)
    one_NX, two_NX = np.ones((1, V // 32), np.int32), np.ones((2, V // 32), np.int32)
    for matcher in (plain, tree):
        matcher.fill(one_NX)
        matcher.take([token])
    plain.fill(one_NX)
    plain.take([token])
    plain.fill(one_NX)
    tree.fill(two_NX, [0, token], [0, 0])
    assert plain.is_stuck and "too many expressions" in plain.reason
    assert not one_NX.any() and not two_NX[1].any()
    assert grammars.left_after(rule, [token, token]) == ([], plain.reason)


def first_id(text: str) -> int:
    return int(byte_tokenizer(300).encode(text, add_special_tokens=False)[0])


def mask_of(token: int) -> np.ndarray:
    mask_X = np.zeros(V // 32, np.int32)
    mask_X[token // 32] = 1 << token % 32
    return mask_X
