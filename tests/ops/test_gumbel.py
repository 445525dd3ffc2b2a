"""The noise of sampling is Gumbel, and independent between neighbours."""

import torch
from scipy import stats

from specdec.ops.gumbel import gumbel_noise

LIMIT = 1e-4


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
