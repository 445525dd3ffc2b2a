"""Which tokens may come next in one text, and after each node of a draft tree: masks of one bit a token.

A text is at one place of its grammar.  From there the matcher walks along the tree's paths and back, so each node's mask is
that of its own path.  This module knows no tensor.

Shapes: N nodes, X = ceil(vocabulary / 32) words of a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

ALL = -1  # a word of a mask that allows all its tokens


class Matcher:
    """The place of one text in its grammar.

    start: makes the library's matcher at the beginning of a text.
    ends: ids that end the text.  They may stand where it is complete, or where the grammar itself has them.
    is_over: whether the text has ended, or holds a token that its grammar does not allow; then nobody reads its masks.
    is_stuck: whether the library failed at a token that it allows, because of its limits.  Then no token is allowed.
    reason: what the library said when it last failed; empty: it has not failed.
    """

    def __init__(self, start: Callable[[], Any], ends: Sequence[int], vocab_size: int) -> None:
        self._start, self._ends, self._vocab_size = start, frozenset(ends), vocab_size
        self._inner = start()
        self._tokens: list[int] = []
        self._end_words = [(token >> 5, np.array(1 << (token & 31), np.uint32).view(np.int32)) for token in sorted(ends)]
        self.is_over = self.is_stuck = False
        self.reason = ""

    def take(self, tokens: Sequence[int]) -> None:
        """Goes on along tokens that the text has got."""
        for token in tokens:
            if self.is_over or self.is_stuck:
                return
            if self._goes_on(token):
                self._tokens.append(token)
                continue
            mask_X = np.zeros(-(-self._vocab_size // 32), np.int32)
            self.is_stuck = not self._fill_one(mask_X) or self._fails(token, mask_X)
            self.is_over = not self.is_stuck

    def fill(self, masks_NX: np.ndarray, tokens_N: Sequence[int] = (), parents_N: Sequence[int] = ()) -> None:
        """Writes the mask after each node of a tree.

        masks_NX: int32, contiguous.  tokens_N, parents_N: of the tree; its root is the text's last token, so the root's mask is
        that of the text.  Empty: the tree is a root.

        A node that breaks the grammar is banned by its parent's mask.  It is padding, and all nodes after it are: their masks
        allow everything, because nobody reads what the target says there.  So are nodes after the end of the text.
        """
        masks_NX[:] = ALL
        if self.is_over:
            return
        children: list[list[int]] = [[] for _ in range(len(masks_NX))]
        for node in range(1, len(tokens_N)):
            children[parents_N[node]].append(node)
        if not self.is_stuck:
            self._fill_from(0, [], masks_NX, tokens_N, children)
        if self.is_stuck:
            masks_NX[:] = 0

    def _fill_from(
        self, node: int, path: list[int], masks_NX: np.ndarray, tokens_N: Sequence[int], children: list[list[int]]
    ) -> None:
        """Fills the masks of a node, at which the library's matcher stands, and of all nodes after it.

        path: the tokens after the root, the node's own included.
        """
        if not self._fill_one(masks_NX[node]):
            self._restore(path)
            return
        for child in children[node]:
            token = tokens_N[child]
            if self._goes_on(token):
                self._fill_from(child, [*path, token], masks_NX, tokens_N, children)
                if not self._inner.rollback(1):
                    self._restore(path)
            elif self._fails(token, masks_NX[node]):
                masks_NX[child] = 0
                self._restore(path)
            elif self._inner.is_error():
                self._restore(path)

    def _goes_on(self, token: int) -> bool:
        """Moves the library's matcher on, if the token neither ends the text nor breaks the grammar.  Drafts may be any ids."""
        if token in self._ends or not 0 <= token < self._vocab_size:
            return False
        return self._inner.try_consume_tokens([token]) == 1

    def _fails(self, token: int, mask_X: np.ndarray) -> bool:
        """Whether a token at which the library does not go on is one that it allows: then its limits are reached.

        mask_X: the mask before the token.  The library keeps the error to itself where tokens are only tried.
        """
        is_allowed = token not in self._ends and 0 <= token < self._vocab_size and mask_X[token >> 5] >> (token & 31) & 1
        if is_allowed:
            self._inner.consume_tokens([token])
            self._keep_reason()
        return bool(is_allowed)

    def _keep_reason(self) -> None:
        self.reason = " ".join(self._inner.get_error().replace("<non-verbose/>", "").split()) or "no reason given"

    def _fill_one(self, mask_X: np.ndarray) -> bool:
        """Fills the mask at the place of the library's matcher.  False: its limits are reached, and no token is allowed."""
        self._inner.unsafe_compute_mask_ptr(mask_X.ctypes.data, mask_X.nbytes)
        if self._inner.is_error():
            mask_X[:] = 0
            self._keep_reason()
            return False
        if self._inner.is_accepting():
            for word, bit in self._end_words:
                mask_X[word] |= bit
        return True

    def _restore(self, path: Sequence[int]) -> None:
        """Makes the library's matcher anew, after an error, which it does not survive."""
        self._inner = self._start()
        mask_X = np.zeros(-(-self._vocab_size // 32), np.int32)
        for token in (*self._tokens, *path):  # with a mask before each token, as the text had: masks move the library's limits
            self._inner.unsafe_compute_mask_ptr(mask_X.ctypes.data, mask_X.nbytes)
            if self._inner.try_consume_tokens([token]) != 1:
                self._inner.consume_tokens([token])  # says why
                self._keep_reason()
                self.is_stuck = True
                return
