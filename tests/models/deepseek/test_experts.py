"""Routers and mixtures of experts against loops over tokens, groups and experts.

Shapes: T tokens, H hidden size, E experts, K experts of a token (top_k), F intermediate size of an expert.
"""

from typing import Literal

import pytest
import torch
from torch import Tensor

from specdec.models.config import ExpertsConfig
from specdec.models.experts import Router, gathered_experts, grouped_experts, masked_experts
from specdec.ops.products.experts import PLAIN, Form, SwiGLU


def router_of(weight_EH: Tensor, config: ExpertsConfig, correction_E: Tensor | None = None) -> Router:
    router = Router(weight_EH.shape[1], config).to(weight_EH.dtype).requires_grad_(False)
    router.weight.copy_(weight_EH)
    if correction_E is not None:
        router.correction_E.copy_(correction_E)
    return router


def test_a_router_of_a_wider_model_rounds_no_logit() -> None:
    """Keeps out: float32 logits in a pass that is there to tell what float32 does to a text."""
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(size, 24, generator=generator).double() for size in (5, 6))
    router = router_of(weight, ExpertsConfig(6, 3, 8, 1, "softmax", None, None, False, 1.0))
    topk_weights_TK, topk_ids_TK = router(x)
    want_TE = (x @ weight.T).softmax(-1)
    torch.testing.assert_close(topk_weights_TK, want_TE.gather(1, topk_ids_TK), atol=1e-14, rtol=1e-12)


def test_a_router_of_16_bits_computes_in_32() -> None:
    """Keeps out: logits rounded to bfloat16, by which experts change places that transformers tells apart."""
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(size, 64, generator=generator).bfloat16() for size in (50, 16))
    router = router_of(weight, ExpertsConfig(16, 3, 8, 1, "softmax", None, None, False, 1.0))
    want_TK, ids_TK = (x.float() @ weight.float().T).softmax(-1).topk(3)
    topk_weights_TK, topk_ids_TK = router(x)
    assert topk_weights_TK.dtype == torch.float32 and torch.equal(topk_ids_TK, ids_TK)
    torch.testing.assert_close(topk_weights_TK, want_TK, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
@pytest.mark.parametrize("bias", [0.1, 2.0])
def test_routers_choose_among_the_best_groups_alone(gate: Literal["softmax", "sigmoid"], bias: float) -> None:
    """DeepSeek's rule, expert by expert.

    Keeps out: an expert of a group that was not selected, whose score stands at 0 and above those that large negative biases
    have pushed below 0; weights of biased scores; groups ranked by their best expert where the best two count.
    """
    E, K, G, top, T, H = 12, 3, 4, 2, 40, 16
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(size, H, generator=generator).double() for size in (T, E))
    correction = bias * (torch.randn(E, generator=generator) - 1)
    router = router_of(weight, ExpertsConfig(E, K, 8, 1, gate, G, top, True, 1.7), correction if gate == "sigmoid" else None)
    topk_weights_TK, topk_ids_TK = router(x)
    logits_TE = x @ weight.T
    scores_TE = logits_TE.softmax(-1) if gate == "softmax" else logits_TE.sigmoid()
    for token, scores in enumerate(scores_TE.tolist()):
        ranks = [s + c for s, c in zip(scores, correction.tolist())] if gate == "sigmoid" else scores
        members = [range(group * E // G, (group + 1) * E // G) for group in range(G)]
        best = 2 if gate == "sigmoid" else 1
        of_group = [sum(sorted((ranks[e] for e in group), reverse=True)[:best]) for group in members]
        groups = sorted(range(G), key=lambda group: -of_group[group])[:top]
        want = sorted((e for group in groups for e in members[group]), key=lambda e: -ranks[e])[:K]
        assert topk_ids_TK[token].tolist() == want
        total = sum(scores[e] for e in want)
        torch.testing.assert_close(topk_weights_TK[token].tolist(), [1.7 * scores[e] / total for e in want])


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
        cast = Form(form.gate, *(None if bias is None else bias.to(dtype) for bias in form[1:]))
        found = experts(x.to(dtype), weights.to(dtype), topk_ids, gate_up.to(dtype), down.to(dtype), cast)
        torch.testing.assert_close(found.double(), want, atol=1e-4, rtol=1e-4)


def test_an_expert_that_nobody_chose_is_not_heard() -> None:
    """Keeps out: 0 times infinity, from an expert that overflows float16 for tokens that did not choose it."""
    x_TH, weights = torch.randn(6, 8).half(), torch.ones(6, 1)
    gate_up, down = torch.randn(3, 8, 8).half(), torch.randn(3, 8, 4).half()
    gate_up[2] *= 6e4
    topk_ids = torch.tensor([[0], [1], [0], [1], [0], [1]])
    want = masked_experts(x_TH, weights, topk_ids, gate_up[:2], down[:2])
    assert want.isfinite().all()
    torch.testing.assert_close(masked_experts(x_TH, weights, topk_ids, gate_up, down), want, rtol=0, atol=0)
