"""A prediction of the answer, which a request brings, as a source of paths: how it goes on where the answer has come to.

Two places of the prediction are proposed in a round: the one before which the answer's last tokens stand, and the one where the
answer would be if it had kept pace with the prediction.  So a word that was replaced by one as long costs one round, one that
was added or left out two or three.

A row keeps its prediction, its answer's last tokens and its place.  The memory is taken when the first prediction comes; rounds
without predictions never read it.

Shapes: R rows of the batch, B of them running, X tokens of the longest prediction, M = MAX_MATCH, D tokens of a path, E emitted
tokens of a row with padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.batch.emitted import NewTokens
from specdec.batch.ragged import RaggedPrompts
from specdec.batch.state import BatchState
from specdec.batch.transfer import to_device
from specdec.draft.drafter import DrafterContext, Rows
from specdec.draft.join.paths import Paths
from specdec.draft.join.source import PathFinder, PathSource
from specdec.draft.join.survival import PathClass
from specdec.draft.kind import PREDICTION
from specdec.draft.ngram.lookup import MAX_MATCH
from specdec.draft.prediction.places import fill_paths, follow
from specdec.ops.index import arange
from specdec.options import EngineOptions
from specdec.steps import RowEntry

# What is expected of the first token after a match of so many tokens, and where the answer would be, before anything was seen.
MATCHED = (0.3, 0.4, 0.55, 0.65, 0.7, 0.75, 0.8, 0.8, 0.85)
PACE = (0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.8, 0.85)


class Predicted(PathSource):
    """The prediction after its best match, and where the answer would be."""

    name = PREDICTION
    classes = (PathClass(MATCHED), PathClass(PACE))
    paths = (0, 1)
    step = PREDICTION
    description = "predictions of requests"

    def row_bytes(self, positions: int) -> int:
        return positions * torch.int32.itemsize

    def finder(self, context: DrafterContext) -> PredictionFinder:
        return PredictionFinder(context)


@dataclass(frozen=True)
class PredictionRows(Rows):
    """ids_RX: int32, each row's prediction.  sizes_R: int64, how many tokens that has; 0: there is none.
    recent_RM: int64, the answer's last tokens, -1 before its first one.
    at_R: int64, the place in the prediction of the answer's next token, as far as is known.
    found_R: int64, the place from which a round's first path went on; of a round's draft, for its extend.
    """

    ids_RX: Tensor
    sizes_R: Tensor
    recent_RM: Tensor
    at_R: Tensor
    found_R: Tensor

    @classmethod
    def empty(cls, rows: int, longest: int, device: torch.device) -> PredictionRows:
        numbers = [torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(3)]
        recent_RM = torch.full((rows, MAX_MATCH), -1, dtype=torch.int64, device=device)
        return cls(torch.zeros(rows, longest, dtype=torch.int32, device=device), numbers[0], recent_RM, *numbers[1:])


class PredictionFinder(PathFinder):
    """Keeps the rows' predictions, and how far their answers have come."""

    rows: PredictionRows | None = None

    def __init__(self, context: DrafterContext) -> None:
        self.size = context.rows, context.max_positions
        self.device = context.device

    def enter(self, entries: Sequence[RowEntry]) -> None:
        given = [entry for entry in entries if entry.prediction is not None]
        if self.rows is None:
            if not given:
                return
            self.rows = PredictionRows.empty(*self.size, self.device)
        rows_E = to_device([entry.row for entry in entries], self.device)
        sizes, places, recent = list[int](), list[int](), list[list[int]]()
        for entry in entries:
            ids, written = entry.prediction or (), entry.written if entry.prediction is not None else ()
            sizes.append(len(ids))
            places.append(len(written))
            recent.append([*[-1] * MAX_MATCH, *written][-MAX_MATCH:])
        self.rows.sizes_R.index_copy_(0, rows_E, to_device(sizes, self.device))
        self.rows.at_R.index_copy_(0, rows_E, to_device(places, self.device))
        self.rows.recent_RM.index_copy_(0, rows_E, to_device(recent, self.device))
        for entry in given:
            assert entry.prediction is not None
            ids_X = to_device(entry.prediction, self.device, torch.int32)
            self.rows.ids_RX[entry.row, : ids_X.shape[0]].copy_(ids_X)

    def fill(self, state: BatchState, depth: int, out: Paths) -> None:
        assert self.rows is not None, "a round needs predictions only where some row has one"
        fill_paths(self.rows.narrow(state.rows), depth, out)

    def extend(self, state: BatchState, new: NewTokens) -> None:
        if self.rows is not None:
            follow(self.rows.narrow(state.rows), new.tokens_BE, (new.last_B + 1) * state.active_B)

    def keep(self, state: BatchState, new: NewTokens) -> None:
        """No draft has looked for a place: the answer goes on from where it was."""
        if self.rows is not None:
            self.rows.found_R.copy_(self.rows.at_R)
            self.extend(state, new)

    def prefill(self, state: BatchState, prompts: RaggedPrompts, first_B: Tensor) -> None:
        """The answer's first token, or of a request that had a row before, its last one."""
        if self.rows is None:
            return
        rows_B, all_B = prompts.rows_B, arange(first_B.shape[0], first_B.device)
        some = PredictionRows(*(tensor.index_select(0, rows_B) for tensor in (self.rows.tensors())))
        some.found_R.copy_(some.at_R)
        follow(some, prompts.known_or(first_B)[all_B, None], prompts.final_B.long())
        for name in ("recent_RM", "at_R"):  # parts of padding share a row that nobody reads
            getattr(self.rows, name).index_copy_(0, rows_B, getattr(some, name))

    def changed(self, state: BatchState) -> list[Tensor]:
        if self.rows is None:
            return []
        rows = self.rows.narrow(state.rows)
        return [rows.recent_RM, rows.at_R]

    def clear_rows(self, rows_R: Tensor) -> None:
        if self.rows is not None:
            self.rows.sizes_R.index_fill_(0, rows_R, 0)


def open_source(options: EngineOptions) -> PathSource:
    return Predicted()
