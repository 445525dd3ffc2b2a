"""Sources that read a table of other texts: what followed a row's last tokens there, in the common scope or in its own.

Shapes: R rows of the batch, B of them running.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.batch.state import BatchState
from specdec.batch.transfer import to_device
from specdec.draft.drafter import DrafterContext, Rows
from specdec.draft.join.paths import Paths
from specdec.draft.join.source import PathFinder, PathSource, TextKeeper
from specdec.draft.join.survival import PathClass
from specdec.draft.suffix.device_table import DeviceTable
from specdec.draft.suffix.host_table import TOKEN_BYTES
from specdec.draft.suffix.lookup import Continuations, find_continuations
from specdec.draft.suffix.texts import ALL_ROWS
from specdec.steps import RowEntry
from specdec.tables.steps import FillTable, TableName, TableStep

# What is expected of the first token before anything was seen, by the length of the match; 0: there is none.
FIRST = (0.01, 0.08, 0.15, 0.3, 0.4, 0.5, 0.55, 0.6, 0.7)


class TableSource(PathSource):
    """The commonest continuation of the longest match, and the best one that begins otherwise.

    capacity: tokens of the table.  by_scope: whether rows read the texts of their own scope, and not what all may read.
    """

    classes = (PathClass(FIRST), PathClass(tuple(0.5 * rate for rate in FIRST)))
    paths = (0, 1)

    def __init__(self, name: TableName, description: str, capacity: int, by_scope: bool) -> None:
        self.name, self.description, self.by_scope = name, description, by_scope
        self.tables: Mapping[TableName, int] = {name: capacity}
        self.table_bytes = capacity * TOKEN_BYTES
        self.table: DeviceTable | None = None

    def load(self, device: torch.device) -> None:
        (capacity,) = self.tables.values()
        self.table = DeviceTable(capacity, device)

    def finder(self, context: DrafterContext) -> TableFinder:
        assert self.table is not None, "it has its memory"
        return TableFinder(self.table, context, self.by_scope)


@dataclass(frozen=True)
class ScopeRows(Rows):
    """keys_R: int64, the key of each row's scope; 0: it reads nothing."""

    keys_R: Tensor


class TableFinder(PathFinder):
    """Looks rows' last tokens up in a table."""

    rows: ScopeRows
    own_texts: TextKeeper

    def __init__(self, table: DeviceTable, context: DrafterContext, by_scope: bool) -> None:
        self.table, self.by_scope = table, by_scope
        keys_R = torch.full((context.rows,), 0 if by_scope else ALL_ROWS, dtype=torch.int64, device=context.device)
        self.rows = ScopeRows(keys_R)

    def follow(self, texts: TextKeeper) -> None:
        self.own_texts = texts

    def enter(self, entries: Sequence[RowEntry]) -> None:
        if self.by_scope:
            device = self.rows.keys_R.device
            rows_E, keys_E = to_device([(entry.row, entry.scope) for entry in entries], device).unbind(1)
            self.rows.keys_R.index_copy_(0, rows_E, keys_E)

    def clear_rows(self, rows_R: Tensor) -> None:
        if self.by_scope:
            self.rows.keys_R.index_fill_(0, rows_R, 0)

    def bring_table(self, step: TableStep) -> None:
        if isinstance(step, FillTable):
            self.table.fill(step.first, step.text_T, step.order_T)
        else:
            self.table.use(step.keys_S, step.bounds_S2)

    def fill(self, state: BatchState, depth: int, out: Paths) -> None:
        keys_B, text = self.rows.narrow(state.rows).keys_R, self.own_texts.text(state)
        find_continuations(self.table, text, keys_B, depth, Continuations(*out[:3]))
