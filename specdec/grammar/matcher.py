"""Which tokens may come next in one text, and after each node of a draft tree: masks of one bit a token.

A text is at one place of its grammar.  From there the matcher walks along the tree's paths and back, so each node's mask is
that of its own path.  This module knows no tensor.

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


class Matcher:
    """The place of one text in its grammar.

    start: makes the library's matcher at the beginning of a text; it may share what it learns with others of that grammar.
    renew: makes one that shares nothing.
    ends: ids that end the text.  They may stand where it is complete, or where the grammar itself has them.
    is_over: whether the text has ended, or holds a token that its grammar does not allow; then nobody reads its masks.
    is_stuck: whether the library failed at the text itself, because of its limits.  Then no token is allowed.
    is_alone: whether the library failed at a draft.  From then on drafts are not looked at, and none may be accepted.
    reason: what the library said when it last failed; empty: it has not failed.
    """

    def __init__(self, start: Callable[[], Any], renew: Callable[[], Any], ends: Sequence[int], vocab_size: int) -> None:
        self._renew, self.ends, self.vocab_size = renew, frozenset(ends), vocab_size
        self.inner = start()
        self._tokens: list[int] = []
        self._end_words = [(token >> 5, np.array(1 << (token & 31), np.uint32).view(np.int32)) for token in sorted(ends)]
        self.is_over = self.is_stuck = self.is_alone = False
        self.reason = ""

    def take(self, tokens: Sequence[int]) -> None:
        """Goes on along tokens that the text has got."""
        for token in tokens:
            if self.is_over or self.is_stuck:
                return
            if self._goes_on(token):
                self._tokens.append(token)
            elif not self.may_follow(token):
                self.is_over = True
            else:
                self._take_anew(token)

    def fill(self, masks_NX: np.ndarray, tokens_N: Sequence[int] = (), parents_N: Sequence[int] = ()) -> None:
        """Writes the mask after each node of a tree.

        masks_NX: int32, contiguous.  tokens_N, parents_N: of the tree; its root is the text's last token, so the root's mask is
        that of the text.  Empty: the tree is a root.

        A node that its parent's mask bans is padding, and all nodes after it are: their masks allow everything, because nobody
        reads what the target says there.  So are nodes after the end of the text, and all nodes where `is_alone`.
        """
        masks_NX[:] = ALL
        if self.is_over:
            return
        if not self.is_stuck:
            self._fill_root(masks_NX[0])
        if self.is_stuck:
            masks_NX[:] = 0
        elif not self.is_alone and len(tokens_N) > 1:
            children: list[list[int]] = [[] for _ in range(len(masks_NX))]
            for node in range(1, len(tokens_N)):
                children[parents_N[node]].append(node)
            if not self.walk(lambda: self._fill_after(0, masks_NX, tokens_N, children)):
                masks_NX[1:] = ALL

    def walk(self, visit: Callable[[], None]) -> bool:
        """Calls a function that moves the library's matcher along drafts and back to the text, or raises LimitError.

        False: it raised that, and no draft may be accepted any more.
        """
        try:
            visit()
        except LimitError:
            self.is_alone = True
            self._begin_anew()
        return not self.is_alone

    def may_follow(self, token: int) -> bool:
        """Whether a text can go on with a token, whatever its grammar.  Drafts may be any ids."""
        return 0 <= token < self.vocab_size and token not in self.ends

    def may_end(self, token: int) -> bool:
        """Whether a token would end the text, which is complete at the place of the library's matcher."""
        return token in self.ends and self.inner.is_accepting()

    def mask(self) -> np.ndarray:
        """[X] int32: the mask at the place of the library's matcher.  LimitError if the library fails."""
        mask_X = np.empty(-(-self.vocab_size // 32), np.int32)
        if not self._fill_one(mask_X):
            raise LimitError
        return mask_X

    def back(self, tokens: int = 1) -> None:
        """Moves the library's matcher back."""
        if not self.inner.rollback(tokens):
            raise LimitError

    def _fill_root(self, mask_X: np.ndarray) -> None:
        if not self._fill_one(mask_X):
            self.is_stuck = not (self._begin_anew() and self._fill_one(mask_X))

    def _fill_after(self, node: int, masks_NX: np.ndarray, tokens_N: Sequence[int], children: list[list[int]]) -> None:
        """Fills the masks of all nodes after one at which the library's matcher stands, and whose own mask is there."""
        for child in children[node]:
            token = tokens_N[child]
            if not self.may_follow(token) or not has(masks_NX[node], token):
                continue
            if not self._goes_on(token) or not self._fill_one(masks_NX[child]):
                raise LimitError
            self._fill_after(child, masks_NX, tokens_N, children)
            self.back()

    def _goes_on(self, token: int) -> bool:
        """Moves the library's matcher on, if the token neither ends the text nor breaks the grammar."""
        return self.may_follow(token) and self.inner.try_consume_tokens([token]) == 1

    def _take_anew(self, token: int) -> None:
        """Goes on along a token at which the library did not."""
        mask_X = np.empty(-(-self.vocab_size // 32), np.int32)
        if not self._begin_anew() or not self._fill_one(mask_X):
            self.is_stuck = True
        elif self._goes_on(token):
            self._tokens.append(token)
        elif has(mask_X, token):
            self.inner.consume_tokens([token])  # says why; the library keeps the error to itself where tokens are only tried
            self._keep_reason()
            self.is_stuck = True
        else:
            self.is_over = True

    def _begin_anew(self) -> bool:
        """Leads a new matcher of the library along the text.  False: it fails there, so the text is stuck."""
        self.inner = self._renew()
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
        """Fills the mask at the place of the library's matcher.  False: the library has failed."""
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
