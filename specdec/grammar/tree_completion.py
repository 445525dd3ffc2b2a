"""Draft trees without drafts that break a grammar: the target reads none of them.

A drafter knows no grammar.  Of its tree those drafts stay that keep the grammar, as do all drafts before them.  In the places
of the others the tree gets tokens that no drafter proposed: the only token that the grammar allows after a node, or all of them
where they are few.  What is left is padding: tokens that the grammar bans, which nobody can accept.

This module knows no tensor.  Shapes: N nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from specdec.grammar.matcher import ALL, GrammarState, Matcher

FEW = 16  # threshold: where the grammar allows at most so many tokens, all of them are worth a place that nobody else takes
FIRST_WORDS = 16  # of a mask, where a banned token is looked for first: nearly every mask bans one there


class TreeCompletion:
    """One tree under a grammar.

    tokens, parents: the nodes so far, padding left out; parents come before their children.
    """

    def __init__(self, matcher: Matcher, drafts_N: Sequence[int], parents_N: Sequence[int], max_depth: int, is_chain: bool):
        self.matcher, self.is_chain, self.max_depth = matcher, is_chain, max_depth
        self._drafts, self._above, self._nodes = drafts_N, parents_N, len(drafts_N)
        self.tokens, self.parents = [drafts_N[0]], [0]
        self._states, self._is_leaf = [matcher.here], [True]  # by node

    def run(self) -> tuple[list[int], list[int]]:
        """The tree's tokens and parents, as many as were drafted.  The matcher stays at its state."""
        if self.matcher.is_alone or not self.matcher.walk(self._complete):
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
        drafts, above, nodes = self._drafts, self._above, {0: 0}
        keeps = self.matcher.allows(drafts, above)
        if all(keeps):
            self.tokens, self.parents = list(drafts), list(above)
            return
        for draft in range(1, self._nodes):
            if keeps[draft]:
                parent, token = nodes[above[draft]], drafts[draft]
                nodes[draft] = self._add(parent, token, self.matcher.next_state(self._states[parent], token))

    # ---- what the grammar says by itself ----

    def _add_forced(self) -> None:
        """Adds the only token that may follow, after each node without a child, and after that one in turn."""
        for node, state in self._leaves():
            if (only := self.matcher.only_token(state)) is not None:
                self._add(node, only, self.matcher.next_state(state, only))

    def _add_few(self) -> None:
        """Adds all tokens that may follow a node without a child, where they are few; to a chain the first of them."""
        for node, state in self._leaves():
            for token in _proposed(self.matcher, state)[: 1 if self.is_chain else self._nodes - len(self.tokens)]:
                self._add(node, token, self.matcher.next_state(state, token))

    def _leaves(self) -> Iterator[tuple[int, GrammarState]]:
        """The nodes without a child after which one may stand, as long as there is room; those that are added meanwhile too."""
        node = 0
        while node < len(self.tokens) < self._nodes:
            state = self._states[node]
            if self._is_leaf[node] and state.depth < self.max_depth and not state.is_end:
                yield node, state
            node += 1

    def _pad(self) -> None:
        """Fills the tree with a token that is banned where it stands.  Where nothing is banned, any token is a draft."""
        while room := self._nodes - len(self.tokens):
            last = len(self.tokens) - 1 if self.is_chain else 0
            state = self._states[last]
            banned = self._drafts[0] if state.is_end else _banned(self.matcher, state)
            if banned is not None:
                self.tokens += [banned] * room
                self.parents += range(last, last + room) if self.is_chain else [0] * room
            else:
                held = {token for token, above in zip(self.tokens[1:], self.parents[1:], strict=True) if above == last}
                token = next(token for token in range(self.matcher.vocab_size) if token not in held)
                self._add(last, token, self.matcher.next_state(state, token))

    def _add(self, above: int, token: int, state: GrammarState) -> int:
        self.tokens.append(token)
        self.parents.append(above)
        self._states.append(state)
        self._is_leaf[above] = False
        self._is_leaf.append(True)
        return len(self.tokens) - 1


def look_ahead(
    matcher: Matcher, nodes: int, max_depth: int, is_chain: bool, is_late: Callable[[], bool] = lambda: False
) -> None:
    """Looks at the states of the tree that a grammar makes by itself, so that completing a drafted one takes less time.

    is_late: asked before each state; when it says so, no further one is looked at.
    """

    def look() -> None:
        ahead = [matcher.here]
        _banned(matcher, matcher.here)
        for state in ahead:
            if len(ahead) >= nodes or is_late():
                return
            if state.depth < max_depth and not state.is_end:
                tokens = _proposed(matcher, state)[: 1 if is_chain else nodes - len(ahead)]
                ahead += [matcher.next_state(state, token) for token in tokens]

    matcher.walk(look)


def _proposed(matcher: Matcher, state: GrammarState) -> Sequence[int]:
    """The tokens that may follow at a state, if they are at most FEW; else none.  LimitError if the library fails."""
    if state.few is None:
        only = matcher.only_token(state)  # takes less time than a mask
        state.few = _few(matcher.mask(state)) if only is None else [only]
    return state.few


def _few(mask_X: np.ndarray) -> Sequence[int]:
    if np.count_nonzero(mask_X) > FEW:
        return ()
    words = mask_X.nonzero()[0]
    tokens: list[int] = []
    for word, bits in zip(words.tolist(), mask_X[words].view(np.uint32).tolist(), strict=True):
        if len(tokens) + bits.bit_count() > FEW:
            return ()
        while bits:
            tokens.append(32 * word + _lowest(bits))
            bits &= bits - 1
    return tokens


def _banned(matcher: Matcher, state: GrammarState) -> int | None:
    """A token that a state's mask bans; None if it bans none.  LimitError if the library fails."""
    if state.banned is None:
        state.banned = _first_banned(matcher.mask(state), matcher.vocab_size)
    return state.banned if state.banned < matcher.vocab_size else None


def _first_banned(mask_X: np.ndarray, vocab_size: int) -> int:
    """The first token that a mask bans; vocab_size if it bans none."""
    for word, bits in enumerate(mask_X[:FIRST_WORDS].tolist()):
        if bits != ALL:
            return min(32 * word + _lowest(~bits), vocab_size)
    words = (mask_X != ALL).nonzero()[0]
    return min(32 * int(words[0]) + _lowest(~int(mask_X[words[0]])), vocab_size) if len(words) else vocab_size


def _lowest(bits: int) -> int:
    """The number of the lowest bit that is set."""
    return (bits & -bits).bit_length() - 1
