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

from specdec.grammar.matcher import ALL, Matcher, Place

FEW = 16  # threshold: where the grammar allows at most so many tokens, all of them are worth a place that nobody else takes


class Completion:
    """One tree under a grammar.

    tokens, parents: the nodes so far, padding left out; parents come before their children.
    """

    def __init__(self, matcher: Matcher, drafts_N: Sequence[int], parents_N: Sequence[int], most_depth: int, is_chain: bool):
        self.matcher, self.is_chain, self.most_depth = matcher, is_chain, most_depth
        self._drafts, self._above, self._nodes = drafts_N, parents_N, len(drafts_N)
        self.tokens, self.parents = [drafts_N[0]], [0]
        self._places, self._is_leaf = [matcher.here], [True]  # by node

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
        return [self._drafts[0]] * self._nodes, list(self._above)

    def _complete(self) -> None:
        self._keep_drafts()
        if len(self.tokens) < self._nodes:
            self._add_forced()
            self._add_few()
            self._pad()

    # ---- what was drafted ----

    def _keep_drafts(self) -> None:
        """Adds the drafts that keep the grammar, in their own order."""
        step, drafts = self.matcher.step, self._drafts
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self._above):
            if node:
                children.setdefault(parent, []).append(node)
        found, left = {0: self.matcher.here}, [0]
        while left:  # path by path, so that the library's matcher moves little
            above = left.pop()
            place = found[above]
            for node in children[above] if above in children else ():
                next_ = step(place, drafts[node])
                if next_ is not None:
                    found[node] = next_
                    left.append(node)
        kept = {0: 0}
        for node in sorted(found)[1:]:
            kept[node] = self._add(kept[self._above[node]], drafts[node], found[node])

    # ---- what the grammar says by itself ----

    def _add_forced(self) -> None:
        """Adds the only token that may follow, after each node without a child, and after that one in turn."""
        for node, place in self._leaves():
            if (only := self.matcher.only_token(place)) is not None:
                self._add(node, only, self.matcher.next_place(place, only))

    def _add_few(self) -> None:
        """Adds all tokens that may follow a node without a child, where they are few; to a chain the first of them."""
        for node, place in self._leaves():
            for token in _proposed(self.matcher, place)[: 1 if self.is_chain else self._nodes - len(self.tokens)]:
                self._add(node, token, self.matcher.next_place(place, token))

    def _leaves(self) -> Iterator[tuple[int, Place]]:
        """The nodes without a child after which one may stand, as long as there is room; those that are added meanwhile too."""
        node = 0
        while node < len(self.tokens) < self._nodes:
            place = self._places[node]
            if self._is_leaf[node] and place.depth < self.most_depth and not place.is_end:
                yield node, place
            node += 1

    def _pad(self) -> None:
        """Fills the tree with tokens that are banned where they stand.  Where nothing is banned, any token is a draft."""
        while room := self._nodes - len(self.tokens):
            last = len(self.tokens) - 1 if self.is_chain else 0
            place = self._places[last]
            banned = [] if place.is_end else _banned(self.matcher, place, room)
            if place.is_end or banned:
                self.tokens += islice(cycle(banned or [self._drafts[0]]), room)
                self.parents += range(last, last + room) if self.is_chain else [0] * room
            else:
                held = {token for token, above in zip(self.tokens[1:], self.parents[1:], strict=True) if above == last}
                token = next(token for token in range(self.matcher.vocab_size) if token not in held)
                self._add(last, token, Place(place, token, token in self.matcher.ends))

    def _add(self, above: int, token: int, place: Place) -> int:
        self.tokens.append(token)
        self.parents.append(above)
        self._places.append(place)
        self._is_leaf[above] = False
        self._is_leaf.append(True)
        return len(self.tokens) - 1


def look_ahead(matcher: Matcher, nodes: int, most_depth: int, is_chain: bool) -> None:
    """Looks at the places of the tree that a grammar makes by itself, so that completing a drafted one takes less time."""

    def look() -> None:
        matcher.mask(matcher.here)
        ahead = [matcher.here]
        for place in ahead:
            if len(ahead) >= nodes:
                return
            if place.depth < most_depth and not place.is_end:
                tokens = _proposed(matcher, place)[: 1 if is_chain else nodes - len(ahead)]
                ahead += [matcher.next_place(place, token) for token in tokens]

    matcher.walk(look)


def _proposed(matcher: Matcher, place: Place) -> Sequence[int]:
    """The tokens that may follow at a place, if they are at most FEW; else none.  LimitError if the library fails."""
    if place.few is None:
        only = matcher.only_token(place)  # takes less time than a mask
        place.few = _few(matcher.mask(place)) if only is None else [only]
    return place.few


def _few(mask_X: np.ndarray) -> Sequence[int]:
    words = mask_X.nonzero()[0]
    if len(words) > FEW:
        return ()
    tokens: list[int] = []
    for word, bits in zip(words.tolist(), mask_X[words].view(np.uint32).tolist(), strict=True):
        if len(tokens) + bits.bit_count() > FEW:
            return ()
        while bits:
            tokens.append(32 * word + _lowest(bits))
            bits &= bits - 1
    return tokens


def _banned(matcher: Matcher, place: Place, most: int) -> list[int]:
    """Up to `most` tokens that a place's mask bans, at most one of each word."""
    mask_X = matcher.mask(place)
    words = (mask_X != ALL).nonzero()[0][:most]
    pairs = zip(words.tolist(), (~mask_X[words]).view(np.uint32).tolist(), strict=True)
    tokens = (32 * word + _lowest(bits) for word, bits in pairs)
    return [token for token in tokens if token < matcher.vocab_size]


def _lowest(bits: int) -> int:
    """The number of the lowest bit that is set."""
    return (bits & -bits).bit_length() - 1
