"""The ways to add up chosen experts against loops over tokens and experts.

Shapes: T tokens, H hidden size, E experts, K experts of a token (top_k), F intermediate size of an expert.
"""

import pytest
import torch

from specdec.models.mixtures.products import gathered_experts, grouped_experts, masked_experts
from specdec.ops.products.experts import PLAIN, Form, SwiGLU
from specdec.ops.products.own_pairs import own_pairs

BIASED = SwiGLU(alpha=1.702, limit=2.0)


@pytest.mark.parametrize("biased", [False, True])
def test_experts_agree(biased: bool) -> None:
    """Three ways to the same sum.  Keeps out: pairs summed under another's weight, an expert without tokens, a bias that is
    left out, or that is another expert's."""
    T, E, K, F, H = 7, 6, 3, 16, 24
    generator = torch.Generator().manual_seed(0)
    sizes = ((T, H), (E, 2 * F, H), (E, H, F), (E, 2 * F), (E, H))
    x, gate_up, down, gate_up_bias, down_bias = (torch.randn(size, generator=generator).double() for size in sizes)
    form = Form(BIASED, gate_up_bias, down_bias) if biased else PLAIN
    topk_ids = torch.stack([torch.randperm(E - 1, generator=generator)[:K] for _ in range(T)])  # the last has none
    weights = torch.rand(T, K, generator=generator).double()
    want = torch.zeros(T, H, dtype=torch.float64)
    for t in range(T):
        for weight, expert in zip(weights[t], topk_ids[t]):
            gate, up = (gate_up[expert] @ x[t] + biased * gate_up_bias[expert]).chunk(2)
            if biased:
                mid = (up.clamp(-2, 2) + 1) * gate.clamp(max=2) * (1.702 * gate.clamp(max=2)).sigmoid()
            else:
                mid = torch.nn.functional.silu(gate) * up
            want[t] += weight * (down[expert] @ mid + biased * down_bias[expert])
    for experts, dtype in (
        (grouped_experts, torch.float32),
        (gathered_experts, torch.float64),
        (masked_experts, torch.float64),
    ):
        cast = Form(form.activation, *(None if bias is None else bias.to(dtype) for bias in form[1:3]))
        found = experts(x.to(dtype), weights.to(dtype), topk_ids, gate_up.to(dtype), down.to(dtype), cast)
        torch.testing.assert_close(found.double(), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("biased", [False, True])
def test_pairs_are_skipped(biased: bool) -> None:
    """Each way with pairs of experts that are not there.  Keeps out: an output that nobody computed, at the weight 0."""
    T, E, K, F, H = 9, 4, 3, 16, 24
    generator = torch.Generator().manual_seed(0)
    sizes = ((T, H), (E, 2 * F, H), (E, H, F), (E, 2 * F), (E, H))
    x, gate_up, down, *biases = (torch.randn(size, generator=generator) for size in sizes)
    topk_ids = torch.stack([torch.randperm(7, generator=generator)[:K] for _ in range(T)])
    weights, topk_ids = own_pairs(torch.rand(T, K, generator=generator), topk_ids + 3, range(5, 5 + E))
    topk_ids[0], weights[0] = E, 0.0  # a token without any
    assert int((topk_ids == E).sum()) > T and ((weights == 0) == (topk_ids == E)).all()
    form = Form(BIASED, *biases, skips=True) if biased else Form(skips=True)
    more = [torch.cat((each, torch.zeros_like(each[:1]))) for each in (gate_up, down, *biases)]  # an expert of zeros
    want = masked_experts(x, weights, topk_ids, *more[:2], Form(BIASED, *more[2:]) if biased else PLAIN)
    for experts in (grouped_experts, gathered_experts, masked_experts):
        torch.testing.assert_close(experts(x, weights, topk_ids, gate_up, down, form), want, atol=1e-5, rtol=1e-5)


def test_an_expert_that_nobody_chose_is_not_heard() -> None:
    """Keeps out: 0 times infinity, from an expert that overflows float16 for tokens that did not choose it."""
    x_TH, weights = torch.randn(6, 8).half(), torch.ones(6, 1)
    gate_up, down = torch.randn(3, 8, 8).half(), torch.randn(3, 8, 4).half()
    gate_up[2] *= 6e4
    topk_ids = torch.tensor([[0], [1], [0], [1], [0], [1]])
    want = masked_experts(x_TH, weights, topk_ids, gate_up[:2], down[:2])
    assert want.isfinite().all()
    torch.testing.assert_close(masked_experts(x_TH, weights, topk_ids, gate_up, down), want, rtol=0, atol=0)
