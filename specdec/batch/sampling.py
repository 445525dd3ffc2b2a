"""Turns logits into tokens by temperature, top-k, top-p and noise that depends only on (seed, position, token).

The seed fixes the noise of every position beforehand.  So the token that is sampled at a position is a function of the target's
logits and the seed: batch, padding, CUDA graphs and the drafter can't change it, and sampled text is the same with and without
speculation.

Shapes: R rows (one distribution each), V vocabulary, F floats and I integers of a row's options.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specdec.steps import RowOptions

if TYPE_CHECKING:
    from specdec.batch.rules import TokenTables

# The columns of a table of options: fields of RowOptions by type.
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
INTS = ("top_k", "seed", "first_end", "processed")

# SplitMix64's constants (Steele, Lea, Flood 2014), as signed 64-bit numbers.  Integer products wrap, as SplitMix64 wants.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


class RowSampling(NamedTuple):
    """How each row samples: the numbers of RowOptions as a table, of which the properties are columns.

    floats_RF: float32.  ints_RI: int64.
    tables: the rows' rules for single tokens; None as long as no row has had any.
    """

    floats_RF: Tensor
    ints_RI: Tensor
    tables: TokenTables | None = None

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


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & (2 ** (64 - bits) - 1)  # int64's own shift fills the high bits with the sign


def mix_64(x: Tensor) -> Tensor:
    """SplitMix64's finaliser: a bijection of int64 whose output bits all depend on all input bits."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def gumbel_noise(seed_R: Tensor, position_R: Tensor, vocab_size: int, first: int = 0) -> Tensor:
    """[R, V] float32 standard Gumbel noise, a pure function of (seed, position, token id), of the V ids from `first` on."""
    key_R = mix_64(mix_64(seed_R + _GOLDEN) + position_R * _GOLDEN)
    tokens_V = torch.arange(first + 1, first + vocab_size + 1, device=seed_R.device)
    bits_RV = _shift_right(mix_64(key_R[:, None] + tokens_V * _GOLDEN), 12)
    uniform_RV = (bits_RV.double() + 0.5) * 2.0**-52  # exact, so never 0 or 1
    return -torch.log(-torch.log(uniform_RV)).float()


def filter_logits(logits_RV: Tensor, sampling: RowSampling) -> Tensor:
    """[R, V]: the logits, with -inf for all tokens outside top-k, and outside top-p of the tokens that top-k keeps.

    logits_RV: already divided by the temperature.

    top-p keeps the smallest set whose probability reaches top_p.  Of equal logits at a border, those of lower ids are kept.
    """
    sorted_RV, order_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logits_RV.shape[-1], device=logits_RV.device)
    top_k_R1 = torch.where(sampling.top_k_R > 0, sampling.top_k_R, logits_RV.shape[-1])[:, None]
    sorted_RV = sorted_RV.masked_fill(rank_V >= top_k_R1, -torch.inf)
    probs_RV = sorted_RV.softmax(-1)
    before_RV = probs_RV.cumsum(-1) - probs_RV
    top_p_R1 = sampling.top_p_R[:, None]
    outside = (before_RV >= top_p_R1) & (top_p_R1 < 1) & (rank_V > 0)
    return torch.empty_like(logits_RV).scatter_(1, order_RV, sorted_RV.masked_fill(outside, -torch.inf))
