"""Which differences of two outputs are near-ties, by scripted logits."""

import pytest
import torch
from toolkit.bench import StubSession

from specdec import EngineOptions, SamplingParams
from specdec.bench.measurement import Divergence
from specdec.bench.near_tie import explain_divergence, first_divergence

GREEDY = SamplingParams(max_tokens=9)


@pytest.mark.parametrize(
    ("logits", "dtype", "verdict"),
    [
        ([0, 16.0, 0, 16.125], torch.bfloat16, "near-tie"),  # one ulp of bf16 at 16 is 0.125
        ([0, 16.0, 0, 16.5], torch.bfloat16, "near-tie"),  # four ulps: three passes round on their own
        ([0, 16.0, 0, 16.625], torch.bfloat16, "DIVERGED"),  # five
        ([0, 16.0, 16.125, 16.125], torch.bfloat16, "near-tie"),  # three tie, and token 1 is third of them
        ([0, 16.0, 16.625, 16.125], torch.bfloat16, "DIVERGED"),  # close to each other, but not to the best
        ([-1000, 16.0, 0, 16.625], torch.bfloat16, "DIVERGED"),  # the ulp is the best token's, not that of the largest number
        ([0, 16.0, 0, 16.0], torch.float32, "DIVERGED"),  # float32 has no excuse
        ([0, 16.0, 0, 16.125], torch.float16, "DIVERGED"),  # its ulp is an eighth of bf16's
    ],
)
def test_a_near_tie_is_two_tokens_within_four_ulps_of_the_best(logits, dtype, verdict):
    """Keeps out: any difference in half precision waved through as rounding, and ties of three called errors."""
    part = explain_divergence(StubSession(logits=logits, dtype=dtype), 0, [1, 2], [9, 3, 3], [9, 1, 3], GREEDY)
    assert (part.verdict, part.index, part.token_baseline, part.token_speculative) == (verdict, 1, 3, 1)
    assert part.margin == pytest.approx(max(logits) - logits[1])


def test_a_near_tie_of_sampled_text_is_one_of_perturbed_scores():
    """Keeps out: sampled text judged by its logits, where the second best token may win by far."""
    from specdec.ops.noise.gumbel import gumbel_noise

    sampling = SamplingParams(temperature=0.5, seed=3)
    noise_V = gumbel_noise(torch.tensor([3]), torch.tensor([3]), 8)[0]  # the token after [1, 2] and [9] has position 3
    target_V = torch.tensor([0.0, 4.0, 0, 4.01, 0, 0, 0, 0])
    session = StubSession(logits=((target_V - noise_V) * 0.5).tolist(), dtype=torch.bfloat16)
    part = explain_divergence(session, 0, [1, 2], [9, 3], [9, 1], sampling)
    assert (part.verdict, part.rank_baseline, part.rank_speculative) == ("near-tie", 1, 2)
    assert part.margin == pytest.approx(0.01, abs=1e-4)


def test_an_output_that_ends_early_has_diverged():
    """Keeps out: a lost tail that compares equal because zip stops."""
    assert first_divergence([1, 2], [1, 2, 3]) == 2
    assert first_divergence([1, 2], [1, 2]) is None
    part = explain_divergence(StubSession(), 0, [1], [1, 2], [1, 2, 3], GREEDY)
    assert part == Divergence(0, 2, None, 3)


@pytest.mark.parametrize(
    ("kept", "below", "verdict"), [("int8", 0.05, "near-tie"), ("int8", 0.2, "DIVERGED"), ("fp8", 0.2, "near-tie")]
)
def test_over_8_bit_kv_the_noise_of_its_steps_counts_too(kept, below, verdict):
    """Keeps out: a bound that follows the size of the logits, which rounding of keys and values does not."""
    session = StubSession(logits=[90.0, 100.0, 98.0, 100.0 - below, *[90.0, 98.0] * 15], dtype=torch.float32)
    session.settings.options = EngineOptions(kv_cache_dtype=kept)
    part = explain_divergence(session, 0, [1, 2], [9, 1], [9, 3], GREEDY)
    assert part.verdict == verdict, (part.margin, part.bound)
