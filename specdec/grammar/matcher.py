"""Which tokens may come next in one text, and after each node of a draft tree: masks of one bit a token.

A text is at one state of its grammar.  From there the matcher walks along the tree's paths and back, so each node's mask is
that of its own path; what it finds at a state is kept until the text goes on.  This module knows no tensor.

The library has limits, and what it has looked at counts towards them: other drafts of a text, and other texts with the same
grammar.  So where the library fails, a new matcher is led along the text alone, as in plain decoding; only if that one fails
too, the text fails.

Shapes: N nodes, X = ceil(vocabulary / 32) words of a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

ALL = -1  # a word of a mask that allows all its tokens


class LimitError(Exception):
    """The library has failed at something that a grammar may allow."""


class GrammarState:
    """Where a text stands, or would stand after some further tokens, and what the library has said there so far.

    path: the tokens between the text's own state and this one.  is_end: whether the last one ends the text, so that nothing
    follows.  after: states one token on.
    only: the tokens that the grammar spells out from here on.  few: all that may follow, where they are few; banned: one that
    may not (tree_completion.py).  Each is None until somebody asks.
    """

    __slots__ = ("after", "banned", "depth", "few", "is_end", "mask_X", "only", "path")

    def __init__(self, path: tuple[int, ...] = (), is_end: bool = False) -> None:
        self.path, self.depth, self.is_end = path, len(path), is_end
        self.after: dict[int, GrammarState] = {}
        self.mask_X: np.ndarray | None = None
        self.only: Sequence[int] | None = None
        self.few: Sequence[int] | None = None
        self.banned: int | None = None


class Matcher:
    """The state of one text in its grammar.

    start: makes the library's matcher at the beginning of a text; it may share what it learns with others of that grammar.
    renew: makes one that shares nothing.
    ends: ids that end the text.  They may stand where it is complete, or where the grammar itself has them.
    here: the text's own state.
    is_over: whether the text has ended, or holds a token that its grammar does not allow; then nobody reads its masks.
    is_stuck: whether the library failed at the text itself, because of its limits.  Then no token is allowed.
    is_alone: whether the library failed at a draft.  From then on drafts are not looked at, and none may be accepted.
    reason: what the library said when it last failed; empty: it has not failed.
    """

    def __init__(self, start: Callable[[], Any], renew: Callable[[], Any], ends: Sequence[int], vocab_size: int) -> None:
        self._renew, self.ends, self.vocab_size = renew, frozenset(ends), vocab_size
        self.inner = start()
        self.here = GrammarState()
        self._at: tuple[int, ...] = ()  # the path to where the library's matcher stands
        self._masks: list[np.ndarray] = []  # memory for masks of states after `here`, of which so many are taken:
        self._taken = 0
        self._tokens: list[int] = []
        self._end_words = [(token >> 5, np.array(1 << (token & 31), np.uint32).view(np.int32)) for token in sorted(ends)]
        self.is_over = self.is_stuck = self.is_alone = False
        self.reason = ""

    def take(self, tokens: Sequence[int]) -> None:
        """Goes on along tokens that the text has got."""
        if not tokens or self.is_over or self.is_stuck:
            return
        self._forget_states()
        count = self._go_on(tokens)
        if count == len(tokens):
            return
        if not self.may_follow(tokens[count]):
            self.is_over = True
        else:
            self._take_anew(tokens[count])
            self.take(tokens[count + 1 :])

    def fill(self, masks_NX: np.ndarray, tokens_N: Sequence[int] = (), parents_N: Sequence[int] = ()) -> None:
        """Writes the mask after each node of a tree.

        masks_NX: int32, contiguous.  tokens_N, parents_N: of the tree; its root is the text's last token, so the root's mask is
        that of the text.  Empty: the tree is a root.

        A node that its parent's mask bans is padding, and all nodes after it are: their masks allow everything, because nobody
        reads what the target says there.  So are nodes after the end of the text, and all nodes where `is_alone`.
        """
        if self.is_over:
            masks_NX[:] = ALL
            return
        if not self.is_stuck:
            self._fill_root(masks_NX[0])
        masks_NX[1:] = ALL
        if self.is_stuck:
            masks_NX[:] = 0
        elif not self.is_alone and len(tokens_N) > 1:
            children: list[list[int]] = [[] for _ in range(len(masks_NX))]
            for node in range(1, len(tokens_N)):
                children[parents_N[node]].append(node)
            if not self.walk(lambda: self._fill_after(0, self.here, masks_NX, tokens_N, children)):
                masks_NX[1:] = ALL

    @property
    def judge(self) -> Matcher | None:
        """What drafts are judged by now; None: nothing."""
        return None if self.is_over or self.is_stuck else self

    # ---- states ----

    def walk(self, visit: Callable[[], None]) -> bool:
        """Calls a function that looks at states after the text's own, or raises LimitError.  The library's matcher comes back.

        False: it raised that, and no draft may be accepted any more.
        """
        try:
            visit()
            self.go(self.here)
        except LimitError:
            self.is_alone = True
            self._begin_anew()
        return not self.is_alone

    def may_follow(self, token: int) -> bool:
        """Whether a text can go on with a token, whatever its grammar.  Drafts may be any ids."""
        return 0 <= token < self.vocab_size and token not in self.ends

    def allows(self, tokens_N: Sequence[int], parents_N: Sequence[int]) -> list[bool | None]:
        """Of each node of a tree, whether the masks along its path allow it.  Any ids.  LimitError as in `go`.

        Where the grammar spells out what comes next, masks hold one spelling alone.  Of the root, the text's last token: True.
        """
        nodes = len(tokens_N)
        keeps: list[bool | None] = [True, *[None] * (nodes - 1)]
        paths: list[list[int]] = [[]]
        for node in range(1, nodes):
            paths.append([*paths[parents_N[node]], tokens_N[node]])
        count = self._count_plain if nodes == 1 or self._plain(tokens_N[1:]) == nodes - 1 else self._count
        only = {0: self.only_token(self.here)}  # by node
        for last in range(nodes - 1, 0, -1):  # deep nodes first, so that one question decides about a whole path
            if keeps[last] is not None:
                continue
            node, unknown = last, []
            while keeps[node] is None:
                unknown.append(node)
                node = parents_N[node]
            path = paths[last]
            depth, at, kept = len(path) - len(unknown), 0, count(path) if keeps[node] else 0
            for child in reversed(unknown):
                if depth < kept and node not in only:
                    only[node], at = self._only_after(path, at, depth), depth
                if depth >= kept or only[node] not in (None, tokens_N[child]):
                    kept = 0
                keeps[child], node, depth = depth < kept, child, depth + 1
            if at and not self.inner.rollback(at):
                raise LimitError
        return keeps

    def _only_after(self, path: list[int], at: int, depth: int) -> int | None:
        """Moves the library's matcher from the text's own state, or `at` tokens on, to `depth` tokens of a path.

        Returns the only token that may follow there; see only_token.
        """
        if not at:
            self.go(self.here)
        if self.inner.try_consume_tokens(path[at:depth]) != depth - at:
            raise LimitError
        only = () if self.inner.is_stopped() else self.inner.compute_ff_tokens()
        return only[0] if only else None

    def _count(self, tokens: list[int]) -> int:
        """How many of these tokens may follow the text's own state one after the other."""
        plain = self._plain(tokens)
        count = self._count_plain(tokens[:plain]) if plain else 0
        if count == plain < len(tokens) and tokens[plain] in self.ends:
            state = self.here
            for token in tokens[:plain]:
                state = self.next_state(state, token)
            count += has(self.mask(state), tokens[plain])
        return count

    def _count_plain(self, tokens: list[int]) -> int:
        """The same, of tokens with which a text can go on."""
        self.go(self.here)
        count: int = self.inner.validate_tokens(tokens)
        if count < len(tokens) and self.inner.is_error():
            raise LimitError
        return count

    def next_state(self, state: GrammarState, token: int) -> GrammarState:
        """The state after a token that the state's mask allows."""
        found = state.after.get(token)
        if found is None:
            found = state.after[token] = GrammarState((*state.path, token), token in self.ends)
        return found

    def only_token(self, state: GrammarState) -> int | None:
        """The only token that may follow at a state, if the grammar spells out what comes next.  LimitError as in `go`."""
        if state.only is None:
            self.go(state)
            state.only = [] if self.inner.is_stopped() else self.inner.compute_ff_tokens()
        return state.only[0] if state.only else None

    def mask(self, state: GrammarState) -> np.ndarray:
        """[X] int32: the mask at a state, not to be changed.  LimitError if the library fails."""
        if state.mask_X is None:
            self.go(state)
            if self._taken == len(self._masks):
                self._masks.append(np.empty(-(-self.vocab_size // 32), np.int32))
            mask_X = self._masks[self._taken]
            if not self._fill_one(mask_X):
                raise LimitError
            state.mask_X, self._taken = mask_X, self._taken + 1
        return state.mask_X

    def go(self, state: GrammarState) -> None:
        """Moves the library's matcher to a state.  LimitError if the library fails."""
        at, path = self._at, state.path
        if at == path:
            return
        common = 0
        if at == path[: len(at)]:
            common = len(at)
        else:
            while at[: common + 1] == path[: common + 1]:
                common += 1
            if not self.inner.rollback(len(at) - common):
                raise LimitError
        if common < len(path) and self.inner.try_consume_tokens(path[common:]) != len(path) - common:
            raise LimitError
        self._at = path

    # ---- the text itself ----

    def _fill_root(self, mask_X: np.ndarray) -> None:
        if self.here.mask_X is None:
            if not self._fill_one(mask_X):
                self.is_stuck = not (self._begin_anew() and self._fill_one(mask_X))
            if not self.is_stuck:
                self.here.mask_X = mask_X.copy()
        else:
            mask_X[:] = self.here.mask_X

    def _fill_after(
        self, node: int, state: GrammarState, masks_NX: np.ndarray, tokens_N: Sequence[int], children: list[list[int]]
    ) -> None:
        """Fills the masks of all nodes after one whose own mask is there."""
        for child in children[node]:
            token = tokens_N[child]
            if not self.may_follow(token) or not has(masks_NX[node], token):
                continue
            next_ = self.next_state(state, token)
            if next_.mask_X is not None:
                masks_NX[child] = next_.mask_X
            else:
                self.go(next_)
                if not self._fill_one(masks_NX[child]):
                    raise LimitError
            if children[child]:
                self._fill_after(child, next_, masks_NX, tokens_N, children)

    def _forget_states(self) -> None:
        """Forgets the text's own state, and all that came after it."""
        self.here, self._at, self._taken = GrammarState(), (), 0

    def _go_on(self, tokens: Sequence[int]) -> int:
        """Moves the library's matcher on along the text, until a token ends that or breaks the grammar.  How many it took."""
        plain = self._plain(tokens)
        count: int = self.inner.try_consume_tokens(tokens[:plain]) if plain else 0
        self._tokens += tokens[:count]
        return count

    def _plain(self, tokens: Sequence[int]) -> int:
        """How many tokens there are before the first with which no text can go on."""
        if self.ends.isdisjoint(tokens) and min(tokens) >= 0 and max(tokens) < self.vocab_size:
            return len(tokens)
        return next(number for number, token in enumerate(tokens) if not self.may_follow(token))

    def _take_anew(self, token: int) -> None:
        """Goes on along a token at which the library did not."""
        mask_X = np.empty(-(-self.vocab_size // 32), np.int32)
        if not self._begin_anew() or not self._fill_one(mask_X):
            self.is_stuck = True
        elif self._go_on([token]):
            return
        elif has(mask_X, token):
            self.inner.consume_tokens([token])  # says why; the library keeps the error to itself where tokens are only tried
            self._keep_reason()
            self.is_stuck = True
        else:
            self.is_over = True

    def _begin_anew(self) -> bool:
        """Leads a new matcher of the library along the text.  False: it fails there, so the text is stuck."""
        self.inner = self._renew()
        self._forget_states()
        mask_X = np.empty(-(-self.vocab_size // 32), np.int32)
        for token in self._tokens:  # with a mask before each token, as in plain decoding: masks move the library's limits
            self.inner.unsafe_compute_mask_ptr(mask_X.ctypes.data, mask_X.nbytes)
            if self.inner.try_consume_tokens([token]) != 1:
                self.inner.consume_tokens([token])
                self._keep_reason()
                self.is_stuck = True
                return False
        return True

    def _fill_one(self, mask_X: np.ndarray) -> bool:
        """Fills the mask at the state of the library's matcher.  False: the library has failed."""
        self.inner.unsafe_compute_mask_ptr(mask_X.ctypes.data, mask_X.nbytes)
        if self.inner.is_error():
            self._keep_reason()
            return False
        if self.inner.is_accepting():
            for word, bit in self._end_words:
                mask_X[word] |= bit
        return True

    def _keep_reason(self) -> None:
        self.reason = " ".join(self.inner.get_error().replace("<non-verbose/>", "").split()) or "no reason given"


def has(mask_X: np.ndarray, token: int) -> bool:
    """Whether a mask allows a token."""
    return bool(mask_X[token >> 5] >> (token & 31) & 1)
