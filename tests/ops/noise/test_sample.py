"""Sampled tokens: the kernel against its definition.  It runs under Triton's interpreter where there is no GPU.

Shapes: B sequences, R rows of logits, V vocabulary.
"""

import pytest
import torch
from toolkit.kernels import DEVICE

from specdec.ops.noise.gumbel import gumbel_noise
from specdec.ops.noise.sample import gumbel_scores, sampled_tokens
from specdec.ops.noise.sample_triton import launch_sampled_tokens


def arguments(B: int, each: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Temperatures, of which the second is 0; seeds; positions."""
    temperature_B = torch.tensor([0.8, 0.0, 0.05, 3.0, 1e-4])[torch.arange(B) % 5]
    return temperature_B, torch.randint(-(2**62), 2**62, (B,)), torch.randint(0, 5000, (B * each,))


@pytest.mark.parametrize(("B", "each", "V"), [(1, 1, 40), (5, 1, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_tokens_are_the_definition_s(B: int, each: int, V: int, dtype: torch.dtype) -> None:
    """Keeps out: the noise of another row, position or slice; ties to the higher id; banned tokens that are chosen; a row that
    is not finite and gives a token."""
    logits_RV = (4 * torch.randn(B * each, V + 3)[:, :V]).to(dtype)
    logits_RV[:, ::3] = -torch.inf
    logits_RV[-1, V // 2 :] = logits_RV[-1, 1]
    if B > 2:
        logits_RV[0, V - 1], logits_RV[1, 7], logits_RV[2] = torch.nan, torch.inf, -torch.inf
    given = arguments(B, each)
    want = sampled_tokens(logits_RV, *given)
    assert (want == -1).sum() == (3 if B > 2 else 0)
    assert torch.equal(launch_sampled_tokens(logits_RV.to(DEVICE), *(tensor.to(DEVICE) for tensor in given)).cpu(), want)


def test_near_ties_are_decided_by_the_exact_noise() -> None:
    """All scores of a row are within 1e-5 of each other.  Keeps out: the noise in float32 deciding, which would part texts of a
    GPU from those of a CPU."""
    temperature_B, seed_B, position_R = torch.tensor([0.7, 1.3]), torch.tensor([5, -9]), torch.arange(4) + 100
    temperature_R, seed_R = temperature_B.repeat_interleave(2), seed_B.repeat_interleave(2)
    logits_RV = (5 - gumbel_noise(seed_R, position_R, 20) + 1e-6 * torch.rand(4, 20)) * temperature_R[:, None]
    scores_RV = gumbel_scores(logits_RV, temperature_R, seed_R, position_R)
    assert scores_RV.max() - scores_RV.min() < 1e-5
    given = (temperature_B, seed_B, position_R)
    found = launch_sampled_tokens(logits_RV.to(DEVICE), *(tensor.to(DEVICE) for tensor in given)).cpu()
    best_R = scores_RV.gather(1, found[:, None])[:, 0]
    assert (scores_RV.amax(-1) - best_R).max() <= 5e-7  # one rounding of the score: logarithms in float64 may differ in one bit


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 0.05, 0.8])
def test_a_model_s_size_in_bfloat16(temperature: float) -> None:
    """Keeps out: blocks and rows of another size than the interpreter's; another division."""
    logits_RV = (3 * torch.randn(128, 128256, device=DEVICE)).bfloat16()
    seed_B, position_R = torch.arange(8, device=DEVICE), torch.arange(128, device=DEVICE)
    temperature_B = torch.full((8,), temperature, device=DEVICE)
    scores_RV = gumbel_scores(logits_RV.float(), temperature_B.repeat_interleave(16), seed_B.repeat_interleave(16), position_R)
    with torch.inference_mode():
        found_R = sampled_tokens(logits_RV, temperature_B, seed_B, position_R)
    assert torch.equal(found_R, scores_RV.argmax(-1))
