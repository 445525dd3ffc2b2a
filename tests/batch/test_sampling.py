"""Filters equal transformers', ties break by id, noise is Gumbel and independent.

Keeps out: top-p before top-k, sets that stop short of top_p or go beyond it, a weak hash.
"""

import pytest
import torch
from scipy import stats
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specdec.batch.sampling import RowSampling, filter_logits, gumbel_noise

LIMIT = 1e-4
FILTERS = [(0.7, 0, 1.0), (1.3, 0, 1.0), (1.3, 5, 1.0), (1.3, 0, 0.8), (0.7, 6, 0.9)]


def rows_of(count: int, temperature: float, top_k: int, top_p: float) -> RowSampling:
    return RowSampling(
        torch.full((count,), temperature), torch.full((count,), top_k), torch.full((count,), top_p), torch.arange(count)
    )


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


def test_noise_is_gumbel_and_independent() -> None:
    """Between neighbours in seed, position and token: a weak hash would show in the correlation."""
    count, seeds = 400, torch.arange(400)
    noise = gumbel_noise(seeds, torch.full((count,), 9), 100)
    assert noise.dtype == torch.float32 and bool(noise.isfinite().all())
    assert stats.kstest(noise.flatten().numpy(), stats.gumbel_r.cdf).pvalue > LIMIT
    neighbours = [
        (noise[:-1], noise[1:]),
        (noise[:, :-1], noise[:, 1:]),
        (noise, gumbel_noise(seeds, torch.full((count,), 10), 100)),
        (noise, gumbel_noise(seeds + 1, torch.full((count,), 8), 100)),
    ]
    for a, b in neighbours:
        assert stats.pearsonr(a.flatten().numpy(), b.flatten().numpy()).pvalue > LIMIT
