"""Turns the options of requests into what steps hold: the numbers of a row, and what a batch needs of a pass."""

from __future__ import annotations

from collections.abc import Iterable

from specdec.config import SamplingParams
from specdec.steps import Needs, RowOptions


def row_options(sampling: SamplingParams, seed: int) -> RowOptions:
    """How a row with these options chooses its tokens.  seed: the caller's, or one that was drawn."""
    return RowOptions(sampling.temperature, sampling.top_p, sampling.top_k, seed)


def needs_of(options: Iterable[SamplingParams]) -> Needs:
    """What a batch of rows with these options needs, and no more."""
    sampled = [each for each in options if each.temperature > 0]
    return Needs(bool(sampled), any(each.top_k > 0 or each.top_p < 1 for each in sampled))
