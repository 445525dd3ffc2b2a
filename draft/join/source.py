"""What a source of paths says of itself, and what a joined drafter asks of it.  A source is a `PathSource` and a `PathFinder`.

A source proposes so many paths of tokens for each row and round, and says of each how long the match is that proposed it.  How
likely a path's tokens are is learnt for its class (survival.py), and the joined drafter makes one tree of all paths.  This
module knows no source.

Shapes: B rows of a state, R some of the rows, P paths of a source, D tokens of a path, T tokens of ragged prompts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from specdec.batch.emitted import NewTokens
from specdec.batch.ragged import RaggedPrompts
from specdec.batch.state import BatchState
from specdec.draft.drafter import CachedBySlot, DrafterContext, Rows
from specdec.draft.join.paths import Paths
from specdec.draft.join.survival import PathClass
from specdec.draft.ngram.lookup import PagedTexts
from specdec.steps import Needs, RowEntry
from specdec.tables.steps import TableName, TableStep


class TextKeeper(Protocol):
    """The drafter, or the first source, which keeps the texts of all rows."""

    def text(self, state: BatchState) -> PagedTexts:
        """Of these rows."""


class PathSource(ABC):
    """A source before it has a batch.

    name: how `draft=` spells it, and what the origins of a token call it.
    classes: of paths whose survival is learnt together, and what is expected of each at first.
    paths: of each path that it proposes in a round, best first, which of its classes it is.
    step: the need (see Needs) of rounds in which it proposes anything, which costs nothing in others, because graphs are
        captured by needs; empty: it does in all rounds.
    slot_bytes: what it keeps of each token of the first group of layers.
    tables: of other texts that it reads, and how many tokens each holds.  table_bytes: what they take.
    fills: whether it gives every row a path as deep as paths may be, so that trees have as many nodes as they must.
    description: what it is, in a few words, said of a drafter that it is joined with.
    """

    name: str
    classes: Sequence[PathClass]
    paths: Sequence[int]
    step: str = ""
    slot_bytes: int = 0
    tables: Mapping[TableName, int] = {}
    table_bytes: int = 0
    fills = False
    description: str

    def load(self, device: torch.device) -> None:  # noqa: B027
        """Takes the memory that all rows have in common, before the rest is given to keys and values.  To be called once."""

    def row_bytes(self, positions: int) -> int:
        """What it keeps of each row of that many positions, at most."""
        return 0

    def runs(self, needs: Needs) -> bool:
        """Whether it proposes anything in rounds of these needs."""
        return not self.step or self.step in needs.steps

    @abstractmethod
    def finder(self, context: DrafterContext) -> PathFinder:
        """The source at work on a batch."""


class PathFinder(ABC):
    """Fills paths for the running batch.  All of it runs inside a CUDA graph, so memory keeps its place.

    caches: what it keeps by slot, in the target's pages.  rows: what it keeps by row; None: nothing.
    """

    caches: Sequence[CachedBySlot] = ()
    rows: Rows | None = None

    def follow(self, texts: TextKeeper) -> None:  # noqa: B027
        """Told once of who keeps the rows' texts."""

    def bring_table(self, step: TableStep) -> None:
        """Takes a part of one of the source's tables; see `Drafter.bring_table`."""
        raise NotImplementedError

    @abstractmethod
    def fill(self, state: BatchState, depth: int, out: Paths) -> None:
        """Writes the paths of a round that follow each row's bonus token.

        out: its own paths of these rows, views with a stride between rows.  All their tokens are written: ids in the
        first `depth` places at most, and -1 after a path's end; a path without any is all -1.  Lengths and
        support are written for every path.
        """

    def enter(self, entries: Sequence[RowEntry]) -> None:  # noqa: B027
        """Requests take rows, outside of any graph."""

    def extend(self, state: BatchState, new: NewTokens) -> None:  # noqa: B027
        """Learns what a round emitted.  state.lens_B is already the length after the round."""

    def keep(self, state: BatchState, new: NewTokens) -> None:
        """Learns what a paused round emitted, in which nobody drafted."""
        self.extend(state, new)

    def prefill(self, state: BatchState, prompts: RaggedPrompts, first_B: Tensor) -> None:  # noqa: B027
        """Learns parts of prompts; see `Drafter.prefill`."""

    def changed(self, state: BatchState) -> list[Tensor]:
        """The tensors that a round changes and a later one reads; see `Drafter.changed`."""
        return []

    def move_rows(self, sources_R: Tensor, targets_R: Tensor) -> None:
        """Makes each target row what its source row was before."""
        if self.rows is not None:
            self.rows.move(sources_R, targets_R)

    def clear_rows(self, rows_R: Tensor) -> None:  # noqa: B027
        """Forgets rows whose requests have ended."""
