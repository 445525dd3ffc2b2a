"""How rows sample: their options as a table.

Tokens are chosen with noise that the seed fixes beforehand (ops/noise/gumbel.py).  So the token that is sampled at a position
is a function of the target's logits and the seed: batch, padding, CUDA graphs and the drafter can't change it, and sampled text
is the same with and without speculation.

Shapes: R rows (one distribution each), F floats and I integers of a row's options.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specdec.batch.masks import BitMasks
from specdec.batch.sending import sent
from specdec.ops.noise.floor import Filters
from specdec.steps import RowOptions

if TYPE_CHECKING:
    from specdec.batch.rules import TokenTables

# The columns of a table of options: fields of RowOptions by type.
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
INTS = ("top_k", "seed", "first_end", "processed")


class RowSampling(NamedTuple):
    """How each row samples: the numbers of RowOptions as a table, of which the properties are columns.

    floats_RF: float32.  ints_RI: int64.
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
        floats = [[getattr(row, name) for name in FLOATS] for row in rows]
        ints = [[getattr(row, name) for name in INTS] for row in rows]
        return cls(sent(floats, device, torch.float32), sent(ints, device))

    @property
    def temperature_R(self) -> Tensor:
        return self.floats_RF[:, FLOATS.index("temperature")]

    @property
    def top_p_R(self) -> Tensor:
        return self.floats_RF[:, FLOATS.index("top_p")]

    @property
    def min_p_R(self) -> Tensor:
        return self.floats_RF[:, FLOATS.index("min_p")]

    @property
    def repetition_penalty_R(self) -> Tensor:
        return self.floats_RF[:, FLOATS.index("repetition_penalty")]

    @property
    def presence_penalty_R(self) -> Tensor:
        return self.floats_RF[:, FLOATS.index("presence_penalty")]

    @property
    def frequency_penalty_R(self) -> Tensor:
        return self.floats_RF[:, FLOATS.index("frequency_penalty")]

    @property
    def top_k_R(self) -> Tensor:
        return self.ints_RI[:, INTS.index("top_k")]

    @property
    def seed_R(self) -> Tensor:
        return self.ints_RI[:, INTS.index("seed")]

    @property
    def first_end_R(self) -> Tensor:
        return self.ints_RI[:, INTS.index("first_end")]

    @property
    def processed_R(self) -> Tensor:
        return self.ints_RI[:, INTS.index("processed")]

    @property
    def filters(self) -> Filters:
        return Filters(self.temperature_R, self.top_k_R, self.top_p_R, self.min_p_R)

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
