"""Draft trees without drafts that break a grammar: the target reads none of them.

A drafter knows no grammar.  Of its tree those drafts stay that keep the grammar, as do all drafts before them.  In the places
of the others the tree gets tokens that no drafter proposed: the only token that the grammar allows after a node, or all of them
where they are few.  What is left is padding: tokens that the grammar bans, which nobody can accept.

This module knows no tensor.  Shapes: N nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, islice

import numpy as np

from specdec.grammar.matcher import ALL, LimitError, Matcher

FEW = 16  # threshold: where the grammar allows at most so many tokens, all of them are worth a place that nobody else takes


class Completion:
    """One tree under a grammar.

    tokens, parents: the nodes so far, padding left out; parents come before their children.
    """

    def __init__(self, matcher: Matcher, drafts_N: Sequence[int], parents_N: Sequence[int], most_depth: int, is_chain: bool):
        self.matcher, self.is_chain, self.most_depth = matcher, is_chain, most_depth
        self._drafts, self._above = drafts_N, parents_N
        self.tokens, self.parents = [drafts_N[0]], [0]
        self._depths, self._ends, self._held = [0], [False], [set[int]()]
        self._at: list[int] = []  # the tokens after the root along which the library's matcher has been moved

    def run(self) -> tuple[list[int], list[int]]:
        """The tree's tokens and parents, as many as were drafted.  The matcher stays at its place."""
        if not self.matcher.walk(self._complete):
            return self._unread()
        return self.tokens, self.parents

    def _unread(self) -> tuple[list[int], list[int]]:
        """A tree of which nothing may be accepted, because the matcher is alone: each node holds what the root holds.

        Whoever runs the round ends the row's drafts before tokens are chosen; a target that repeats the root's token would
        otherwise accept a node.
        """
        nodes = len(self._drafts)
        return [self._drafts[0]] * nodes, list(self._above)

    def _complete(self) -> None:
        self._keep_drafts()
        if self._room:
            self._add_forced()
        if self._room:
            self._add_few()
        if self._room:
            self._pad()
        self._go([])

    @property
    def _room(self) -> int:
        return len(self._drafts) - len(self.tokens)

    # ---- what was drafted ----

    def _keep_drafts(self) -> None:
        """Adds the drafts that keep the grammar, in their own order."""
        children: list[list[int]] = [[] for _ in self._drafts]
        for node in range(1, len(self._drafts)):
            children[self._above[node]].append(node)
        kept = {0: 0}
        fits = [False] * len(self._drafts)
        self._look_after(0, children, fits)
        for node, token in enumerate(self._drafts):
            if fits[node]:
                kept[node] = self._add(kept[self._above[node]], token, token in self.matcher.ends)

    def _look_after(self, node: int, children: list[list[int]], fits: list[bool]) -> None:
        """Says of each draft after a node whether it keeps the grammar.  The library's matcher stands at the node."""
        inner, matcher = self.matcher.inner, self.matcher
        if not children[node]:
            return
        only = self._only_token()
        for child in children[node]:
            token = self._drafts[child]
            if matcher.may_end(token):
                fits[child] = True
            elif matcher.may_follow(token) and only in (None, token) and not inner.is_stopped():
                if not children[child]:
                    fits[child] = inner.validate_tokens([token]) == 1
                elif inner.try_consume_tokens([token]) == 1:
                    fits[child] = True
                    self._look_after(child, children, fits)
                    matcher.back()

    # ---- what the grammar says by itself ----

    def _add_forced(self) -> None:
        """Adds the only token that may follow, after each node without a child, and after that one in turn."""
        for node in self._leaves():
            self._go(self._path(node))
            only = None if self.matcher.inner.is_stopped() else self._only_token()
            if only is not None and self.matcher.may_follow(only):
                self._add(node, only)

    def _add_few(self) -> None:
        """Adds all tokens that may follow a node without a child, where they are few; to a chain the first of them."""
        for node in self._leaves():
            self._go(self._path(node))
            for token in _few(self.matcher.mask()):
                if self._room and token not in self._held[node]:
                    self._add(node, token, token in self.matcher.ends)
                    if self.is_chain:
                        break

    def _leaves(self) -> Iterator[int]:
        """The nodes without a child after which one may stand, as long as there is room; those that are added meanwhile too."""
        node = 0
        while node < len(self.tokens) and self._room:
            if self._depths[node] < self.most_depth and not self._ends[node] and not self._held[node]:
                yield node
            node += 1

    def _pad(self) -> None:
        """Fills the tree with tokens that are banned where they stand.  Where nothing is banned, any token is a draft."""
        while self._room:
            last = len(self.tokens) - 1 if self.is_chain else 0
            self._go([] if self._ends[last] else self._path(last))
            banned = _banned(self.matcher.mask(), self.matcher.vocab_size, self._room)
            if self._ends[last] or banned:
                padding = list(islice(cycle(banned or [self._drafts[0]]), self._room))
                self.parents += range(last, last + self._room) if self.is_chain else [0] * self._room
                self.tokens += padding
            else:
                token = next(token for token in range(self.matcher.vocab_size) if token not in self._held[last])
                self._add(last, token, token in self.matcher.ends)

    # ---- nodes and places ----

    def _add(self, above: int, token: int, is_end: bool = False) -> int:
        self.tokens.append(token)
        self.parents.append(above)
        self._depths.append(self._depths[above] + 1)
        self._ends.append(is_end)
        self._held[above].add(token)
        self._held.append(set())
        return len(self.tokens) - 1

    def _path(self, node: int) -> list[int]:
        """The tokens from the root, without it, to a node."""
        path = []
        while node:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]

    def _go(self, path: list[int]) -> None:
        """Moves the library's matcher to the end of a path."""
        pairs = zip(self._at, path, strict=False)
        shared = next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(self._at), len(path)))
        if len(self._at) > shared:
            self.matcher.back(len(self._at) - shared)
        ahead = path[shared:]
        if ahead and self.matcher.inner.try_consume_tokens(ahead) != len(ahead):
            raise LimitError
        self._at = path

    def _only_token(self) -> int | None:
        """The only token that may follow at the place of the library's matcher, if the grammar spells out what comes next."""
        run = self.matcher.inner.compute_ff_tokens()
        return run[0] if run else None


def _few(mask_X: np.ndarray) -> list[int]:
    """The tokens that a mask allows, if they are at most FEW; else none."""
    words = np.flatnonzero(mask_X)
    if len(words) > FEW:
        return []
    tokens: list[int] = []
    for word, bits in zip(words.tolist(), mask_X[words].view(np.uint32).tolist(), strict=True):
        if len(tokens) + bits.bit_count() > FEW:
            return []
        while bits:
            tokens.append(32 * word + (bits & -bits).bit_length() - 1)
            bits &= bits - 1
    return tokens


def _banned(mask_X: np.ndarray, vocab_size: int, most: int) -> list[int]:
    """Up to `most` tokens that a mask bans, at most one of each word."""
    words = np.flatnonzero(mask_X != ALL)[:most].tolist()
    tokens = [32 * word + next(bit for bit in range(32) if not mask_X[word] >> bit & 1) for word in words]
    return [token for token in tokens if token < vocab_size]
