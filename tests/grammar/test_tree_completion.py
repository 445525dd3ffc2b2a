"""Completed draft trees against brute force: what stays, what takes the places of broken drafts, and what is padding.

Shapes: N nodes, X words of a mask.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from toolkit.checkpoints.grammars import EOS, RULES, STOP, V, allowed, first_id, mask_after, paths_of, tokenizer_json

from specdec.config import GrammarKind
from specdec.grammar.library import Grammars
from specdec.grammar.matcher import GrammarState, Matcher
from specdec.grammar.tree_completion import FEW, TreeCompletion, _banned, _few, look_ahead
from specdec.steps import Grammar

N, DEEPEST = 12, 4


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(tokenizer_json, V, [EOS])


class Masks:
    """The tokens that a grammar allows after paths, each found by a matcher that has seen nothing else."""

    def __init__(self, grammars: Grammars, kind: GrammarKind, text: list[int]) -> None:
        self.grammars, self.kind, self.text = grammars, kind, text
        self.known: dict[tuple[int, ...], list[int]] = {}

    def after(self, path: Sequence[int]) -> list[int]:
        if tuple(path) not in self.known:
            self.known[tuple(path)] = allowed(mask_after(self.grammars, self.kind, [*self.text, *path]))
        return self.known[tuple(path)]


def keeps(masks: Masks, path: tuple[int, ...]) -> bool:
    """Whether each token of a path is allowed after those before it, and none comes after the end."""
    return all(path[i] in masks.after(path[:i]) and not {EOS, STOP} & {*path[:i]} for i in range(len(path)))


def random_tree(draw: random.Random, masks: Masks, root: int, is_chain: bool) -> tuple[list[int], list[int]]:
    """Of distinct siblings; most tokens keep the grammar, others may be any ids."""
    nodes = DEEPEST + 1 if is_chain else N
    tokens, parents = [root], [0]
    while len(tokens) < nodes:
        paths = paths_of(tokens, parents)
        above = len(tokens) - 1 if is_chain else draw.choice([i for i, path in enumerate(paths) if len(path) < DEEPEST])
        fitting = masks.after(paths[above]) if keeps(masks, paths[above]) else range(V)
        token = draw.choice(fitting) if draw.random() < 0.7 else draw.choice([-1, V + 5, EOS, *range(V)])
        if (*paths[above], token) not in paths:
            tokens, parents = [*tokens, token], [*parents, above]
    return tokens, parents


@pytest.mark.parametrize("is_chain", [False, True])
@pytest.mark.parametrize("kind", list(RULES))
def test_the_target_reads_no_broken_draft(grammars: Grammars, kind: GrammarKind, is_chain: bool) -> None:
    """Keeps out: a draft that breaks the grammar and takes a place; one that keeps it and is lost; a place left to padding
    where the grammar says what may stand there; padding that could be accepted; equal siblings; a matcher that has moved."""
    draw, matcher, text = random.Random(2), grammars.matcher(Grammar(kind, RULES[kind], (STOP, EOS))), list[int]()
    padded = added = 0
    for _ in range(14):
        masks = Masks(grammars, kind, text)
        drafts, above = random_tree(draw, masks, text[-1] if text else 0, is_chain)
        if draw.random() < 0.5:
            look_ahead(matcher, len(drafts), DEEPEST, is_chain)
        tokens, parents = TreeCompletion(matcher, drafts, above, DEEPEST, is_chain).run()
        assert len(tokens) == len(parents) == len(drafts) and tokens[0] == drafts[0]
        assert all(0 <= parent < node for node, parent in enumerate(parents) if node) and {*tokens[1:]} <= {*range(V)}
        paths = paths_of(tokens, parents)
        real = [path for path in paths if keeps(masks, path)]
        kept = [path for path in paths_of(drafts, above) if keeps(masks, path)]
        assert paths[: len(real)] == real and real[: len(kept)] == kept, "drafts in their order, then others, then padding"
        assert len(set(real)) == len(real) and max(map(len, real)) <= DEEPEST
        for node in range(len(real), len(paths)):
            assert parents[node] == (node - 1 if is_chain else 0)
        if is_chain:
            assert parents == above
        if len(real) < len(paths):
            open_ = [path for path in (real[-1:] if is_chain else real) if len(path) < DEEPEST and not {EOS, STOP} & {*path}]
            childless = [path for path in open_ if not any(path == child[:-1] for child in real[1:])]
            assert not any(len(masks.after(path)) <= FEW for path in childless)
        padded, added = padded + len(paths) - len(real), added + len(real) - len(kept)
        mask_1X = np.zeros((1, V // 32), np.int32)
        matcher.fill(mask_1X)
        assert allowed(mask_1X[0]) == masks.after(()) and not matcher.is_alone
        token = draw.choice([t for t in masks.after(()) if t not in (EOS, STOP)] or [EOS])
        matcher.take([token])
        text.append(token)
        if token == EOS:
            break
    assert added and (padded or kind != "json_schema")


def test_forced_tokens_come_first(grammars: Grammars) -> None:
    """Keeps out: the names of a schema's keys left to a drafter that does not know them, or spells them in other tokens."""
    rule, run, mask_1X = Grammar("regex", "name the dog", (EOS,)), list[int](), np.zeros((1, V // 32), np.int32)
    while len(run) < DEEPEST:
        matcher = grammars.matcher(rule)
        matcher.take(run)
        matcher.fill(mask_1X)
        run += allowed(mask_1X[0])
    assert len(run) == DEEPEST, "one token a place"
    wrong = [token for token in range(V) if token not in run][:DEEPEST]
    tokens, parents = TreeCompletion(grammars.matcher(rule), [7, *wrong], [0, 0, 0, 0, 0], DEEPEST, False).run()
    assert tokens == [7, *run] and parents == [0, 0, 1, 2, 3]
    half = first_id("a")  # of "am": masks hold one spelling of what is forced
    tokens, parents = TreeCompletion(
        grammars.matcher(rule), [7, run[0], half, *wrong[:2]], [0, 0, 1, 0, 0], DEEPEST, False
    ).run()
    assert tokens == [7, *run] and parents == [0, 0, 1, 2, 3]


@pytest.mark.parametrize("is_chain", [False, True])
def test_what_was_looked_at_ahead_is_not_asked_again(grammars: Grammars, is_chain: bool) -> None:
    """Keeps out: a host that asks the library again for what it found while the device drafted, so that the device waits."""
    matcher = grammars.matcher(Grammar("json_schema", RULES["json_schema"], (EOS,)))
    nodes = DEEPEST + 1 if is_chain else N
    parents = [0, *(range(nodes - 1) if is_chain else [0] * (nodes - 1))]
    look_ahead(matcher, nodes, DEEPEST, is_chain)
    matcher.inner = None  # nobody can be asked any more
    tokens, above = TreeCompletion(matcher, [0, *[V + 1] * (nodes - 1)], parents, DEEPEST, is_chain).run()
    fresh = grammars.matcher(Grammar("json_schema", RULES["json_schema"], (EOS,)))
    assert (tokens, above) == TreeCompletion(fresh, [0, *[V + 1] * (nodes - 1)], parents, DEEPEST, is_chain).run()


def test_looking_ahead_ends_where_the_device_waits(grammars: Grammars) -> None:
    """Keeps out: a device that waits for all places of a tree, though its drafts are there."""
    looked = []
    for most in (0, 2, 99):
        matcher = grammars.matcher(Grammar("json_schema", RULES["json_schema"], (EOS,)))
        asked = iter(range(100))
        look_ahead(matcher, N, DEEPEST, False, lambda: next(asked) >= most)  # noqa: B023 (called in this turn)
        looked.append(sum(1 for _ in states_below(matcher.here)))
    assert looked[0] == 1 < looked[1] < looked[2]


def states_below(state: GrammarState) -> Iterator[GrammarState]:
    """A state, and all after it that were looked at."""
    yield state
    for after in state.after.values():
        yield from states_below(after)


@pytest.mark.parametrize("after", ["og", "[og]"], ids=["three tokens", "one token"])
def test_what_is_spelled_out_comes_before_what_may_be_chosen(grammars: Grammars, after: str) -> None:
    """Keeps out: places given to guesses after one node while the grammar spells out what follows another one."""
    a, b, x, d, o = map(first_id, "abxdo")
    matcher = grammars.matcher(Grammar("regex", f"a[xyz]1|bd{after}", (EOS,)))
    wrong = [first_id("q"), first_id("r")]
    assert TreeCompletion(matcher, [7, a, b, wrong[0]], [0] * 4, DEEPEST, False).run() == ([7, a, b, d], [0, 0, 0, 2])
    assert TreeCompletion(matcher, [7, b, a, *wrong], [0] * 5, 2, False).run() == ([7, b, a, d, x], [0, 0, 0, 1, 2])
    if after == "og":
        assert TreeCompletion(matcher, [7, a, b, *wrong], [0] * 5, DEEPEST, False).run() == ([7, a, b, d, o], [0, 0, 0, 2, 3])


def test_a_draft_in_another_spelling_is_no_draft(grammars: Grammars) -> None:
    """Keeps out: a place for a token that begins what is spelled out, and that the mask bans, as it allows the longer one."""
    dn, a, y, d, n = map(first_id, ("dn", "a", "y", "d", "n"))
    matcher = grammars.matcher(Grammar("regex", "dnay", (EOS,)))
    assert matcher.inner.validate_tokens([d, n]) == 2, "the library itself would take it"
    assert TreeCompletion(matcher, [7, d, n, 5], [0, 0, 1, 0], DEEPEST, False).run() == ([7, dn, a, y], [0, 0, 1, 2])


def test_where_nothing_is_banned_any_token_is_a_draft() -> None:
    """Keeps out: a search without end for a token that a grammar bans, and equal siblings."""

    class Free:
        """A library whose grammar allows all there is, and forces nothing."""

        def __getattr__(self, name: str) -> object:
            say = {"compute_ff_tokens": [], "rollback": True}
            return len if name in ("try_consume_tokens", "validate_tokens") else (lambda *_: say.get(name, False))

        def unsafe_compute_mask_ptr(self, place: int, size: int) -> None:
            ctypes.memset(place, 255, size)

    matcher = Matcher(Free, Free, (EOS,), V)
    none = V + 5  # no id of the target's
    assert TreeCompletion(matcher, [1, none, none, 7], [0, 0, 0, 0], 2, False).run() == ([1, 7, 0, 1], [0, 0, 0, 0])
    assert TreeCompletion(matcher, [1, 5, none], [0, 0, 1], 2, True).run() == ([1, 5, 0], [0, 0, 1])


def test_a_mask_s_tokens_are_those_of_its_bits() -> None:
    """Of vocabularies that end in the middle of a word.

    Keeps out: as many tokens as are worth a place, less one; padding beyond the vocabulary, whose bits are 0 too.
    """
    draw = random.Random(4)
    for _ in range(300):
        vocab = draw.randrange(1, 1000)
        fits = sorted(draw.sample(range(vocab), min(vocab, draw.choice([0, 1, FEW - 1, FEW, FEW + 1, vocab]))))
        mask_X = np.zeros(-(-vocab // 32), np.uint32)
        for token in fits:
            mask_X[token >> 5] |= np.uint32(1 << (token & 31))
        mask_X = mask_X.view(np.int32)
        assert _few(mask_X) == (fits if len(fits) <= FEW else ())
        matcher = Matcher(lambda: None, lambda: None, (), vocab)
        matcher.here.mask_X = mask_X
        assert _banned(matcher, matcher.here) == next((token for token in range(vocab) if token not in fits), None)
