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
    """

    def __init__(self, start: Callable[[], Any], ends: Sequence[int], vocab_size: int) -> None:
        self._start, self._ends, self._vocab_size = start, frozenset(ends), vocab_size
        self._inner = start()
        self._tokens: list[int] = []
        self._end_words = [(token >> 5, np.array(1 << (token & 31), np.uint32).view(np.int32)) for token in sorted(ends)]
        self.is_over = False

    def take(self, tokens: Sequence[int]) -> None:
        """Goes on along tokens that the text has got."""
        for token in tokens:
            if self.is_over:
                return
            if self._goes_on(token):
                self._tokens.append(token)
            else:
                self.is_over = True

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
        self._fill_from(0, [], masks_NX, tokens_N, children)

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

    def _goes_on(self, token: int) -> bool:
        """Moves the library's matcher on, if the token neither ends the text nor breaks the grammar.  Drafts may be any ids."""
        if token in self._ends or not 0 <= token < self._vocab_size:
            return False
        return self._inner.try_consume_tokens([token]) == 1

    def _fill_one(self, mask_X: np.ndarray) -> bool:
        """Fills the mask at the place of the library's matcher.  False: its limits are reached, and no token is allowed."""
        self._inner.unsafe_compute_mask_ptr(mask_X.ctypes.data, mask_X.nbytes)
        if self._inner.is_error():
            mask_X[:] = 0
            return False
        if self._inner.is_accepting():
            for word, bit in self._end_words:
                mask_X[word] |= bit
        return True

    def _restore(self, path: Sequence[int]) -> None:
        """Makes the library's matcher anew, after an error, which it does not survive."""
        self._inner = self._start()
        self._inner.consume_tokens([*self._tokens, *path])
