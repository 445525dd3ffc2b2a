"""The cross-entropy of whole vocabularies: the kernels against the definition, which autograd differentiates.  Under Triton's
interpreter where there is no GPU.
"""

from __future__ import annotations

import pytest
import torch
from toolkit.kernels import DEVICE

from specdec.train.lesson.entropy import Teacher, fused_entropy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [5, 2048, 4099])
def test_the_kernels_are_the_definition(size: int, dtype: torch.dtype) -> None:
    """Keeps out: tokens of a vocabulary's last block, a maximum of an earlier block, and a gradient of other distributions."""
    generator = torch.Generator().manual_seed(0)
    logits, teacher = (torch.randn(2, 3, size, generator=generator).mul(4).to(dtype) for _ in range(2))
    logits[0, 0, 0], logits[1, 2, -1], teacher[0, 1, -1] = 30.0, 31.0, -torch.inf
    weights = torch.rand(2, 3, generator=generator)
    logits, teacher, weights = (x.to(DEVICE) for x in (logits, teacher, weights))
    found = []
    for function in (lambda x: Teacher(teacher.cpu()).entropy(x.cpu()), lambda x: fused_entropy(x, teacher)):
        x = logits.clone().requires_grad_()
        entropy, best = function(x)
        (entropy * weights.to(entropy.device)).sum().backward()
        assert entropy.dtype == torch.float32 and x.grad is not None and x.grad.dtype == dtype
        found.append((entropy.detach().cpu(), best.cpu(), x.grad.cpu().float()))
    (wanted, places, gradient), (got, chosen, other) = found
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(other, gradient, rtol=0 if dtype == torch.float32 else 8e-3, atol=1e-6)
    assert torch.equal(logits.cpu().float().gather(-1, chosen[..., None]), logits.cpu().float().gather(-1, places[..., None]))
