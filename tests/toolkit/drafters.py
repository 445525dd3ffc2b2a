"""Drafters that need no head: one that knows the text, one that is always wrong, one that guesses.  Chains and trees.

Also a chooser of levels for num_steps="auto" that does what a test says.

They take the place of a decoder's own drafter: `driver.replace_drafter(...)`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec import SpecConfig
from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.draft.drafter import Drafter
from specdec.steps import Needs
from toolkit.trees import chain_shape, path_depth, random_shape

if TYPE_CHECKING:
    from toolkit.driver import Driver


class Substitute(Drafter):
    """Draws trees of random shape.  texts: prompt -> the tokens that will follow, further than any draft looks.

    kind: "oracle" puts the text on one path of the tree, "wrong" avoids it everywhere, "random" knows nothing.
    inner: a real drafter whose KV is to be kept in step.
    """

    def __init__(
        self, driver: Driver, spec: SpecConfig, kind: str, vocab_size: int,
        texts: dict[tuple[int, ...], list[int]] | None = None, inner: Any = None,
    ) -> None:  # fmt: skip
        self.driver, self.spec, self.kind, self.vocab_size = driver, spec, kind, vocab_size
        self.texts, self.inner = texts or {}, inner
        self.rows, self.caches = (inner.rows, inner.caches) if inner else (None, ())
        self.random = random.Random(0)

    def draft(self, state: BatchState, spec: SpecConfig, needs: Needs) -> DraftTree:
        S, nd = self.spec.num_steps, self.spec.num_draft_tokens
        rows = [self._row(row, int(state.lens_B[row]), int(state.bonus_B[row])) for row in range(state.rows)]
        tokens_BN = torch.tensor([tokens for tokens, _ in rows])
        if self.spec.topk == 1:
            return DraftTree.chain(tokens_BN)
        return DraftTree(tokens_BN, torch.tensor([parents for _, parents in rows]), min(S, nd - 1))

    def extend(self, *args: Any) -> None:
        if self.inner:
            self.inner.extend(*args)

    def prefill(self, *args: Any) -> None:
        if self.inner:
            self.inner.prefill(*args)

    def keep(self, *args: Any) -> None:
        if self.inner:
            self.inner.keep(*args)

    def catch_up(self, state: BatchState, needs: Needs) -> None:
        if self.inner:
            self.inner.catch_up(state, needs)

    def changed(self, state: BatchState) -> list[Tensor]:
        return self.inner.changed(state) if self.inner else []

    def clear_rows(self, rows_R: Tensor) -> None:
        if self.inner:
            self.inner.clear_rows(rows_R)

    def _row(self, row: int, length: int, bonus: int) -> tuple[list[int], list[int]]:
        """One sequence's tokens and parents."""
        S, nd = self.spec.num_steps, self.spec.num_draft_tokens
        known = self._known(row, length)
        parents, main = random_shape(nd, S, self.random) if self.spec.topk > 1 else chain_shape(nd)
        tokens = [bonus]
        for node in range(1, nd):
            siblings = {tokens[n] for n in range(1, node) if parents[n] == parents[node]}
            depth = path_depth(parents, node)
            if self.kind == "oracle" and node in main:
                tokens.append(known[depth - 1])
                continue
            avoid = siblings | ({known[depth - 1]} if self.kind != "random" else set())
            tokens.append(self.random.choice([t for t in range(self.vocab_size) if t not in avoid]))
        return tokens, parents

    def _known(self, row: int, length: int) -> Sequence[int]:
        """What follows the bonus token, which stands at position `length`."""
        request = self.driver.request_in(row)
        if self.kind == "random" or request is None:  # a padded row
            return [0] * self.spec.num_steps
        prompt = request.prompt_ids
        text = prompt + self.texts[tuple(prompt)]
        known = text[length + 1 : length + 1 + self.spec.num_steps]
        assert len(known) == self.spec.num_steps, "the known text is too short"
        return known


class Script:
    """A controller that gives a list's shapes for round 0, 1, ... and then always the last one."""

    tries = False

    def __init__(self, *shapes: SpecConfig | None) -> None:
        self.shapes = list(shapes)

    def choose(self, rows: int, share: float, pause: int, ready: object) -> SpecConfig | None:
        assert 0 < share <= 1 and ready is None
        return self.shapes.pop(0) if len(self.shapes) > 1 else self.shapes[0]

    def observe(
        self,
        rows: int,
        shape: SpecConfig | None,
        seconds: float,
        accepted: list[int],
        best: list[tuple[int, int]] | None,
        tokens: int,
        matched: list[int] | None,
    ) -> None:
        levels = shape.levels if shape else 0
        assert seconds > 0 and tokens > 0 and all(0 <= a <= levels for a in accepted)
        assert (matched is not None) == (shape is not None and shape.max_depth is not None)
        assert all(0 <= by_others <= a for by_others, a in zip(matched or (), accepted, strict=matched is not None))
        for a, (first, length) in zip(accepted, best or (), strict=best is not None):
            assert 0 <= first <= a and first <= length <= levels
