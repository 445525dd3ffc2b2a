"""How rows sample: their options as a table, and the tokens that top-k and top-p keep.

Tokens are chosen with noise that the seed fixes beforehand (ops/noise/gumbel.py).  So the token that is sampled at a position
is a function of the target's logits and the seed: batch, padding, CUDA graphs and the drafter can't change it, and sampled text
is the same with and without speculation.

Shapes: R rows (one distribution each), V vocabulary, F floats and I integers of a row's options.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specdec.batch.masks import BitMasks
from specdec.steps import RowOptions

if TYPE_CHECKING:
    from specdec.batch.rules import TokenTables

# The columns of a table of options: fields of RowOptions by type.
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
INTS = ("top_k", "seed", "first_end", "processed")

_BEST = 2.0**40  # the weight of a row's best token; that of a token 28 below it in logits is 1


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
        return cls(torch.tensor(floats, dtype=torch.float32, device=device), torch.tensor(ints, device=device))

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


def filter_logits(logits_RV: Tensor, sampling: RowSampling) -> Tensor:
    """[R, V]: the logits, with -inf for all tokens outside top-k, and outside top-p of the tokens that top-k keeps.

    logits_RV: already divided by the temperature.

    top-p keeps the smallest set whose probability reaches top_p.  Of equal logits at a border, those of lower ids are kept.
    """
    sorted_RV, order_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logits_RV.shape[-1], device=logits_RV.device)
    top_k_R1 = torch.where(sampling.top_k_R > 0, sampling.top_k_R, logits_RV.shape[-1])[:, None]
    sorted_RV = sorted_RV.masked_fill(rank_V >= top_k_R1, -torch.inf)
    # Sums of integers are exact in any order.  A sum of floats has an order that depends on the number of rows, by which
    # a token at top-p's border could depend on the batch.
    weights_RV = ((sorted_RV - sorted_RV[:, :1]).exp() * _BEST).long()
    sums_RV = weights_RV.cumsum(-1)
    top_p_R1 = sampling.top_p_R[:, None]
    outside = (sums_RV - weights_RV >= top_p_R1 * sums_RV[:, -1:].double()) & (top_p_R1 < 1) & (rank_V > 0)
    return torch.empty_like(logits_RV).scatter_(1, order_RV, sorted_RV.masked_fill(outside, -torch.inf))
