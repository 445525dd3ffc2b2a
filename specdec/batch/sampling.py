"""How rows sample: their options as a table.

Tokens are chosen with noise that the seed fixes beforehand (ops/noise/gumbel.py).  So the token that is sampled at a position
is a function of the target's logits and the seed: batch, padding, CUDA graphs and the drafter can't change it, and sampled text
is the same with and without speculation.

Shapes: R rows (one distribution each), F floats and I integers of a row's options.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.batch.grammars.masks import BitMasks
from specdec.batch.tables import TokenTables
from specdec.batch.transfer import to_device
from specdec.ops.noise.filters import Filters
from specdec.steps import FLOATS, INTS, RowOptions


class RowSampling(NamedTuple):
    """How each row samples: the numbers of RowOptions as a table.

    floats_RF: float32, whose columns are FLOATS.  ints_RI: int64, whose columns are INTS.
    tables: the rows' rules for single tokens; None as long as no row has had any.
    masks: of one pass, for rows that have a grammar; None where no row has.
    """

    floats_RF: Tensor
    ints_RI: Tensor
    tables: TokenTables | None = None
    masks: BitMasks | None = None

    @classmethod
    def of(cls, rows: Sequence[RowOptions], device: torch.device | str) -> RowSampling:
        """The table of these rows."""
        floats_RF = to_device([row.floats for row in rows], device, torch.float32)
        return cls(floats_RF, to_device([row.ints for row in rows], device))

    def column(self, name: str) -> Tensor:
        """[R]: a number of each row, by its name in RowOptions; a view."""
        return self.floats_RF[:, FLOATS.index(name)] if name in FLOATS else self.ints_RI[:, INTS.index(name)]

    @property
    def temperature_R(self) -> Tensor:
        return self.column("temperature")

    @property
    def seed_R(self) -> Tensor:
        return self.column("seed")

    @property
    def filters(self) -> Filters:
        return Filters(self.temperature_R, self.column("top_k"), self.column("top_p"), self.column("min_p"))

    @property
    def rows(self) -> int:
        return self.ints_RI.shape[0]

    def of_rows(self, rows_R: Tensor) -> RowSampling:
        """The table of some of the rows.  rows_R: int64."""
        tables = None if self.tables is None else self.tables.of_rows(rows_R)
        return RowSampling(self.floats_RF.index_select(0, rows_R), self.ints_RI.index_select(0, rows_R), tables)

    def expand_rows(self, times: int) -> RowSampling:
        """Each row's numbers repeated `times` times; the copies of a row are adjacent."""
        if times == 1:
            return self
        return RowSampling(self.floats_RF.repeat_interleave(times, dim=0), self.ints_RI.repeat_interleave(times, dim=0))
