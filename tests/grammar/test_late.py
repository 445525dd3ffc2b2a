"""Texts whose grammar begins to hold after a thought or a marker: masks of trees against those of plain decoding.

Shapes: N nodes, X words of a mask.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from toolkit.checkpoints.grammars import allowed
from toolkit.checkpoints.tokenizers import byte_tokenizer

from specdec.grammar.late import LateMatcher
from specdec.grammar.library import Grammars
from specdec.grammar.matcher import ALL
from specdec.grammar.wait import Thought, TokenTexts, Wait, WaitPlan
from specdec.steps import Grammar

V, EOS, OPEN, CLOSE, CALL = 384, 300, 301, 302, 303
# Texts that are tokens besides single bytes; two of them write a marker and go on, one its beginning.
MORE = ("</s>", "<think>", "</think>", "<call>", ">b", "ink>", "@(x", "@(")
INNER = byte_tokenizer(300)
WAITS = {
    "thought": Wait(Thought("<think>", "</think>")),
    "open thought": Wait(Thought("<think>", "</think>", is_open=True)),
    "marker": Wait(None, ("<call>",)),
    "spelled marker": Wait(None, ("@(", "<call>")),
    "marker after a thought": Wait(Thought("<think>", "</think>"), ("<call>",)),
    "marker at the start": Wait(Thought("<think>", "</think>"), ("@(", "<call>"), at_start=True),
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    INNER.add_tokens(list(MORE[4:]))
    INNER.add_special_tokens({"additional_special_tokens": list(MORE[:4])})
    return Grammars(INNER.backend_tokenizer.to_str, V, [ids(MORE[0])[0]])


def ids(text: str) -> list[int]:
    return list(INNER.encode(text, add_special_tokens=False))


def rule(wait: Wait) -> Grammar:
    return Grammar("regex", "(ab|b)+c", (ids("</s>")[0],), wait)


def after(grammars: Grammars, wait: Wait, tokens: Sequence[int]) -> np.ndarray:
    """The mask after a text, in plain decoding."""
    matcher, mask_1X = grammars.matcher(rule(wait)), np.zeros((1, V // 32), np.int32)
    matcher.fill(mask_1X)
    for token in tokens:
        matcher.take([token])
        matcher.fill(mask_1X)
    return mask_1X[0]


@pytest.mark.parametrize("name", WAITS)
def test_each_node_s_mask_is_that_of_its_own_path(grammars: Grammars, name: str) -> None:
    """Keeps out: drafts that are accepted past the place where the grammar begins, and a tree that leaves a trace."""
    wait, draw = WAITS[name], random.Random(name)
    likely = [*(ids(text)[0] for text in MORE), *map(int, ids("@(<think>abc\n"))]
    for _ in range(3):
        matcher, text = grammars.matcher(rule(wait)), list[int]()
        for _ in range(4):
            tokens, parents, paths = [text[-1] if text else 0], [0], [list[int]()]
            for node in range(1, 9):
                parent = draw.randrange(max(0, node - 4), node)
                banned = [token for token in likely if token not in allowed(after(grammars, wait, text + paths[parent]))]
                fitting = [token for token in likely if token not in banned]
                token = draw.choice(fitting if fitting and draw.random() < 0.8 else [-1, V + 5, *likely])
                tokens, parents, paths = [*tokens, token], [*parents, parent], [*paths, [*paths[parent], token]]
            masks_NX = np.zeros((9, V // 32), np.int32)
            matcher.fill(masks_NX, tokens, parents)
            reached = {0}
            for node in range(1, 9):
                if parents[node] in reached and tokens[node] in allowed(masks_NX[parents[node]]):
                    reached.add(node)
            for node in reached:
                assert (masks_NX[node] == after(grammars, wait, text + paths[node])).all(), (text, paths[node])
            token = draw.choice([token for token in likely if token in allowed(masks_NX[0])] or [ids("</s>")[0]])
            matcher.take([token])
            text.append(token)


@pytest.mark.parametrize(
    ("name", "free", "held"),
    [
        ("thought", ["", "<think>", "<think>x(</thi"], ["b", "<think>x</think>", "<think></think>ab"]),
        ("open thought", ["", "b", "<think>"], ["x</think>", "</think>b"]),
        ("marker", ["", "<cal", "x<call", "</think>"], ["<call>", "xb<call>ab", "<<call>"]),
        ("spelled marker", ["@", "@<"], ["x@(", "@(ab", "@@("]),
        ("marker after a thought", ["<think><call>", "a<think>", " \n<think>"], ["a<call>", "<think><call></think>z<call>"]),
        ("marker at the start", ["x@(", "\n@", "<think>@("], ["@(", " \n@(", "<think>x</think>\n<call>b"]),
    ],
)
def test_a_grammar_begins_where_it_should(grammars: Grammars, name: str, free: list[str], held: list[str]) -> None:
    """Keeps out: a grammar that holds for a thought, one that never begins, and one that begins at a marker in a thought."""
    for text in (*free, *held):
        matcher = grammars.matcher(rule(WAITS[name]))
        assert isinstance(matcher, LateMatcher)
        matcher.take(ids(text))
        assert matcher.is_armed == (text in held), text
    left = set(allowed(after(grammars, WAITS[name], ids(held[0]))))
    assert left <= {*ids("abc"), ids(">b")[0], ids("</s>")[0]} and left


def test_a_token_that_goes_on_after_the_marker_is_banned(grammars: Grammars) -> None:
    """Keeps out: a call whose first letter no grammar has seen; and a ban where no marker is being written."""
    crossing, whole = ids("@(x")[0], ids("@(")[0]
    assert {crossing, whole} == {token for token in (crossing, whole) if len(ids("@(x")) == len(ids("@(")) == 1}
    for text in ("", "z", "@"):
        mask = allowed(after(grammars, WAITS["spelled marker"], ids(text)))
        assert crossing not in mask and whole in mask and len(mask) == V - 1
    within = allowed(after(grammars, WAITS["marker"], ids("<") + ids("call")))
    assert ids(">b")[0] not in within and ids(">")[0] in within and ids("@(x")[0] in within
    assert (after(grammars, WAITS["marker"], ids("z")) == ALL).all()


def test_a_marker_that_nobody_can_write_is_refused_at_the_door() -> None:
    """Keeps out: an error on the engine's thread, of which every text dies, and a vocabulary that is read there."""
    vocabulary = TokenTexts([b"a", b"b", b"ab"])
    with pytest.raises(ValueError, match="no tokens of the vocabulary write b'z"):
        WaitPlan(Wait(None, ("az",), keeps_marker=True), vocabulary)
    assert WaitPlan(Wait(None, ("aba",), keeps_marker=True), vocabulary).spelled(b"aba") == [2, 0]
    grammars = Grammars(INNER.backend_tokenizer.to_str, V, [300])
    grammars.prepare(WAITS["marker"])
    grammars._read_tokenizer = None  # type: ignore[assignment,method-assign]
    assert grammars._plan(WAITS["marker"]).waits
