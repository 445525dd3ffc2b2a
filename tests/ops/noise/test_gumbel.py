"""The noise of sampling is Gumbel and independent between neighbours; perturbed logits, and their kernels, follow it."""

import pytest
import torch
from scipy import stats

from specdec.ops.noise.approximate_cutoff import approximate_cutoffs
from specdec.ops.noise.filters import Filters
from specdec.ops.noise.gumbel import Noise, gumbel_noise, perturb, token_noise
from specdec.ops.topk import greedy_tokens, top_tokens

LIMIT = 1e-4
V = 50
# Noise of seeds 0 and -5 at positions 3 and 70000, tokens 0 and 1: texts of users' seeds depend on it.
OLD = [[-1.130407452583313, 0.10814732313156128], [-0.934382438659668, -1.0567576885223389]]


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


def test_the_noise_of_an_id_does_not_depend_on_its_run() -> None:
    """Keeps out: noise by place in a run of the vocabulary instead of by id, and another noise than texts of old seeds had."""
    seeds, positions = torch.tensor([0, -5]), torch.tensor([3, 70000])
    whole = gumbel_noise(seeds, positions, 40)
    assert torch.equal(gumbel_noise(seeds, positions, 9, first=31), whole[:, 31:])
    assert torch.equal(token_noise(seeds, positions, torch.tensor([7, 0, 7])), whole[:, [7, 0, 7]])
    torch.testing.assert_close(whole[:, :2], torch.tensor(OLD))


def noise_of(*temperatures: float, ahead: int = 2) -> Noise:
    """A sequence for each temperature."""
    count = len(temperatures)
    table = torch.tensor([[temperature, 1.0] for temperature in temperatures])  # as in a batch, the column is strided
    return Noise(table[:, 0], torch.arange(count) - 1, torch.arange(count, dtype=torch.int32) * 9, ahead, 1.5, 1.2)


def test_perturbed_logits_by_their_definition() -> None:
    """Keeps out: noise of the draft's id, of another position or another sequence; a greedy row that changes at all."""
    noise, offsets = noise_of(0.7, 0.0, 1.3), torch.arange(V) * 3
    logits = torch.randn(6, V, generator=torch.Generator().manual_seed(0))
    got = perturb(logits, noise, offsets)
    for row in range(6):
        b = row // 2
        own = gumbel_noise(noise.seed_B[b : b + 1], noise.lens_B[b : b + 1].long() + 2, 4 * V)[0, torch.arange(V) * 4]
        temperature = float(noise.temperature_B[b])
        torch.testing.assert_close(got[row], 1.5 * logits[row] + 1.2 * temperature * own if temperature else logits[row])
    assert torch.equal(got[2:4], logits[2:4])
    assert torch.equal(perturb(logits[:, 20:31], noise, offsets, 20), got[:, 20:31])


def test_logits_below_the_cutoff_count_more() -> None:
    """Keeps out: a filter that changes tokens it keeps, or greedy rows; a ban of what only the drafter holds for unlikely."""
    plain = noise_of(0.7, 0.0)
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(2)) * 3
    few, ones = torch.tensor([5, 5]), torch.ones(2)
    filters = Filters(plain.temperature_B, few, ones, 0 * ones)
    cutoff = approximate_cutoffs(logits, filters)[:2, None]
    below = (cutoff - logits[:2]).clamp(min=0)
    assert bool((below > 0).any(-1).all()) and bool(((below == 0).sum(-1) >= 5).all())
    got = perturb(logits, plain._replace(cutoff_weight=2.0, filters=filters))
    torch.testing.assert_close(got[:2], perturb(logits, plain)[:2] - 1.5 * 2 * below)
    assert torch.equal(got[2:], logits[2:])


@pytest.mark.parametrize("k", [1, 4])
def test_the_best_tokens_of_perturbed_logits(k: int) -> None:
    """Keeps out: scores that are not normalised, ids before the offsets."""
    noise, offsets = noise_of(0.9, 0.0), torch.arange(V) % 7
    logits = torch.randn(4, V, generator=torch.Generator().manual_seed(1))
    want = perturb(logits, noise, offsets).log_softmax(-1)
    logp, ids = top_tokens(logits, k, offsets, noise=noise)
    top = want.topk(k)
    torch.testing.assert_close(logp, top.values)
    assert torch.equal(ids, top.indices + offsets[top.indices])
    assert torch.equal(greedy_tokens(logits, offsets, noise=noise), ids[:, 0])
    assert torch.equal(ids[2:], top_tokens(logits[2:], k, offsets)[1])
