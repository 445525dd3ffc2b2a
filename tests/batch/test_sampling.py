"""Filters equal transformers', ties break by id, and samples follow their distribution.

Keeps out: top-p before top-k, sets that stop short of top_p or go beyond it.
"""

import numpy as np
import pytest
import torch
from toolkit.oracles.statistics import filtered, p_value
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specdec.batch.choose import choose_tokens
from specdec.batch.sampling import RowSampling, filter_logits
from specdec.parallel.group import ALONE
from specdec.parallel.vocabulary import Vocabulary
from specdec.steps import Needs, RowOptions

V, LIMIT = 12, 1e-4
FILTERS = [(0.7, 0, 1.0), (1.3, 0, 1.0), (1.3, 5, 1.0), (1.3, 0, 0.8), (0.7, 6, 0.9)]


def rows_of(count: int, temperature: float, top_k: int, top_p: float) -> RowSampling:
    return RowSampling.of([RowOptions(temperature, top_p, top_k, seed) for seed in range(count)], "cpu")


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), [*FILTERS, (1.0, 1, 1.0), (1.0, 0, 1e-6), (2.0, 50, 0.999)])
def test_filters_equal_transformers(temperature: float, top_k: int, top_p: float) -> None:
    """Keeps out: top-p before top-k, a set that stops short of top_p, the best token filtered away."""
    logits = 3 * torch.randn(64, 40, generator=torch.Generator().manual_seed(0))
    want = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        want = TopKLogitsWarper(min(top_k, 40))(None, want)
    if top_p < 1:
        want = TopPLogitsWarper(top_p)(None, want)
    got = filter_logits(logits / temperature, rows_of(64, temperature, top_k, top_p))
    assert torch.equal(got == -torch.inf, want == -torch.inf)
    torch.testing.assert_close(got, want)


def test_filters_break_ties_by_id() -> None:
    """Keeps out: all of a tie kept or dropped together, so that top_k=2 keeps four."""
    got = filter_logits(torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.0]]), rows_of(1, 1.0, 2, 1.0))
    assert (got[0] > -torch.inf).tolist() == [True, True, False, False, False]


def test_top_p_stops_where_it_is_reached() -> None:
    """Keeps out: one token more than the smallest set, where its probability is exactly top_p."""
    got = filter_logits(torch.zeros(1, 4), rows_of(1, 1.0, 0, 0.5))
    assert (got[0] > -torch.inf).tolist() == [True, True, False, False]


def test_top_p_adds_up_exactly() -> None:
    """Keeps out: the rounding of a long running sum, which depends on how a library cuts it and moves top-p's border."""
    for count, top_p in ((3000, 0.5), (10000, 0.75)):
        kept = filter_logits(torch.zeros(1, count), rows_of(1, 1.0, 0, top_p)).isfinite()
        assert int(kept.sum()) == count * top_p


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (4, 1.0), (0, 0.7)])
def test_tokens_follow_their_distribution(top_k: int, top_p: float) -> None:
    """Over seeds at one position, and over positions at one seed."""
    logits, count = torch.linspace(-2, 2, V).float(), 20_000
    want = filtered(logits.double().numpy(), 0.8, top_k, top_p)
    sampling, needs, vocabulary = rows_of(count, 0.8, top_k, top_p), Needs(sampled=True, filtered=True), Vocabulary.of(V, ALONE)
    by_seed = choose_tokens(logits.expand(count, V), sampling, torch.full((count,), 5), needs, vocabulary)
    sampling.seed_R.fill_(-3)
    by_position = choose_tokens(logits.expand(count, V), sampling, torch.arange(count), needs, vocabulary)
    for tokens in (by_seed, by_position):
        assert p_value(np.bincount(tokens.numpy(), minlength=V), want) > LIMIT
