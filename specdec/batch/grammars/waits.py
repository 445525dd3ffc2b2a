"""Rows whose texts wait for their grammars: where each text stands, so that the device knows by itself which rows halt.

A row halts where its text needs a mask, which only the host can make.  Rounds without masks emit nothing past that place, and
take a row that has halted for padding.  Rounds with masks lead all texts on.  The tables are made when the first such row
enters.  This module knows no mark and no tree.

Shapes: B rows, R some of them, V the vocabulary, X entries of a table, E emitted tokens of a row with padding.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from specdec.batch.sampling import RowSampling
from specdec.batch.transfer import to_device
from specdec.grammar.wait_table import MAX_ENTRIES, WaitTable
from specdec.steps import INTS

NEVER_HALTS = LAST = 2**31 - 1  # a state, and a position, that no text reaches


@dataclass(frozen=True)
class WaitRows:
    """The tables of all rows.  A row that waits for nothing never halts.

    state_B, first_halt_B, num_classes_B, bans_ends_B: int32, where the text stands and numbers of its table; see WaitTable.
    class_BV, after_BX: int16, each token's class, and the state after each class.
    awake_B: int32, of a round without masks, 1 for running rows that had not halted when it began.
    """

    state_B: Tensor
    first_halt_B: Tensor
    num_classes_B: Tensor
    bans_ends_B: Tensor
    awake_B: Tensor
    class_BV: Tensor
    after_BX: Tensor

    @classmethod
    def empty(cls, rows: int, vocab_size: int, device: torch.device | str) -> WaitRows:
        """Tables of rows that wait for nothing."""

        def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        state_B, first_halt_B, num_classes_B, bans_ends_B, awake_B = (zeros(torch.int32) for _ in range(5))
        class_BV, after_BX = zeros(torch.int16, vocab_size), zeros(torch.int16, MAX_ENTRIES)
        first_halt_B.fill_(NEVER_HALTS)
        return cls(state_B, first_halt_B, num_classes_B, bans_ends_B, awake_B, class_BV, after_BX)

    def tensors(self) -> list[Tensor]:
        return [getattr(self, each.name) for each in fields(self)]

    def narrow(self, rows: int) -> WaitRows:
        """Views of the first rows."""
        return WaitRows(*(tensor[:rows] for tensor in self.tensors()))

    def clear_rows(self, rows_R: Tensor) -> None:
        """Lets rows (int64) wait for nothing."""
        self.first_halt_B.index_fill_(0, rows_R, NEVER_HALTS)
        for numbers_B in (self.state_B, self.num_classes_B, self.bans_ends_B):
            numbers_B.index_fill_(0, rows_R, 0)

    def enter(self, row: int, table: WaitTable) -> None:
        """Writes a row's table."""
        device = self.state_B.device
        columns = self.state_B, self.first_halt_B, self.num_classes_B, self.bans_ends_B
        numbers = table.state, table.first_halt, table.num_classes, int(table.bans_ends)
        for numbers_B, number in zip(columns, numbers, strict=True):
            numbers_B[row] = number
        self.class_BV[row].zero_()
        if table.tokens:
            tokens_K, classes_K = to_device([table.tokens, table.classes], device)
            self.class_BV[row].index_copy_(0, tokens_K, classes_K.short())
        self.after_BX[row, : len(table.after)] = to_device(table.after, device, torch.int16)

    def wake(self, active_B: Tensor) -> None:
        """A round without masks begins.  active_B: int32, see BatchState."""
        self.awake_B.copy_(active_B * (self.state_B < self.first_halt_B))

    def without_ends(self, sampling: RowSampling) -> RowSampling:
        """The sampling of a round without masks, in which no end may stand where a text waits for what must come."""
        column, ints_BI = INTS.index("first_end"), sampling.ints_RI.clone()
        ints_BI[:, column].masked_fill_(self.bans_ends_B > 0, LAST)
        return sampling._replace(ints_RI=ints_BI)

    def walk(self, tokens_BE: Tensor, counts_B: Tensor, halts: bool) -> tuple[Tensor, Tensor]:
        """Leads texts along the first counts_B (int64) of these tokens (int64), or less far: to where they halt.

        Returns how many tokens were taken, int64, and the states after them, int32.
        """
        state_B, taken_B, class_BE = self.state_B.long(), torch.zeros_like(counts_B), self.class_BV.gather(1, tokens_BE)
        for place in range(tokens_BE.shape[1]):
            goes_on_B = counts_B > place
            if halts:
                goes_on_B = goes_on_B & (state_B < self.first_halt_B)
            at_B = state_B * self.num_classes_B + class_BE[:, place]
            state_B = torch.where(goes_on_B, self.after_BX.gather(1, at_B[:, None])[:, 0].long(), state_B)
            taken_B = taken_B + goes_on_B
        return taken_B, state_B.int()

    def begin_texts(self, rows_R: Tensor, first_R: Tensor, begins_R: Tensor) -> None:
        """Rows (int64) get the first tokens (int64) of their outputs, or the last ones that they wrote, where begins_R is 1."""
        state_R, of_row_R = self.state_B[rows_R], self.class_BV[rows_R, first_R]
        after_R = self.after_BX[rows_R, state_R.long() * self.num_classes_B[rows_R] + of_row_R]
        self.state_B.index_copy_(0, rows_R, torch.where(begins_R > 0, after_R.int(), state_R))
