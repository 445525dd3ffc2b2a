"""Routers against a definition that goes expert by expert in float64, for every rule.

Shapes: T tokens, H hidden size, E experts, K experts of a token (top_k).
"""

import math
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specdec.models.mixtures.router import Router
from specdec.models.mixtures.rules import ExpertsConfig
from specdec.ops.products.routing import RouterRule, choose

E, K, G, TOP, T, H = 12, 3, 4, 2, 40, 16
GROUPED = [{}, *({"groups": G, "top_groups": TOP, "group_best": best} for best in (1, 2))]
NORMED: list[dict[str, Any]] = [{}, {"normed": True}, {"normed": True, "least_sum": 0.9, "scaling": 1.7}, {"scaling": 2.5}]
NORMED += [{"normed": True, "added_sum": 0.3}]
RULES = [
    RouterRule(K, scores, corrected, **groups, **normed)  # type: ignore[arg-type]
    for scores, corrected, groups, normed in product(("softmax", "sigmoid"), (False, True), GROUPED, NORMED)
] + [RouterRule(K, "softmax of chosen", biased=True)]


def defined(logits: list[float], rule: RouterRule, correction: list[float]) -> dict[int, float]:
    """The weight of each of one token's experts, in Python's own floats."""
    total = sum(map(math.exp, logits))
    if rule.scores == "softmax of chosen":
        best = sorted(range(E), key=lambda e: -logits[e])[: rule.top_k]
        return {e: math.exp(logits[e]) / sum(math.exp(logits[other]) for other in best) for e in best}
    scores = [math.exp(x) / total if rule.scores == "softmax" else 1 / (1 + math.exp(-x)) for x in logits]
    ranks = [score + correction[e] * rule.corrected for e, score in enumerate(scores)]
    allowed = list(range(E))
    if rule.groups:
        members = [allowed[group * E // rule.groups : (group + 1) * E // rule.groups] for group in range(rule.groups)]
        members.sort(key=lambda group: -sum(sorted((ranks[e] for e in group), reverse=True)[: rule.group_best]))
        allowed = [e for group in members[: rule.top_groups] for e in group]
    chosen = sorted(allowed, key=lambda e: -ranks[e])[: rule.top_k]
    divisor = max(sum(scores[e] for e in chosen) + rule.added_sum, rule.least_sum) if rule.normed else 1.0
    return {e: scores[e] / divisor * rule.scaling for e in chosen}


@pytest.mark.slow_cases
@pytest.mark.parametrize("size", [0.1, 2.0])
def test_every_rule_chooses_as_its_definition(size: float) -> None:
    """Keeps out: an expert of a group that was not selected, whose score stands above those that corrections below 0 have;
    weights of corrected scores; groups ranked by their best expert where the best two count; a sum taken before the choice.
    """
    generator = torch.Generator().manual_seed(3)
    logits_TE = 2 * torch.randn(T, E, generator=generator, dtype=torch.float64)
    correction_E = size * (torch.randn(E, generator=generator, dtype=torch.float64) - 1)
    for rule in RULES:
        for in_order in (False, True):
            weights_TK, ids_TK = choose(logits_TE, rule, correction_E if rule.corrected else None, in_order)
            for logits, weights, ids in zip(logits_TE.tolist(), weights_TK.tolist(), ids_TK.tolist(), strict=True):
                want = defined(logits, rule, correction_E.tolist())
                assert ids == list(want), rule
                assert weights == pytest.approx(list(want.values()), rel=1e-12), rule


def router_of(weight_LH: Tensor, config: ExpertsConfig) -> Router:
    router = Router(weight_LH.shape[1], config).to(weight_LH.dtype).requires_grad_(False)
    router.weight.copy_(weight_LH)
    return router


def test_a_router_of_a_wider_model_rounds_no_logit() -> None:
    """Keeps out: float32 logits in a pass that is there to tell what float32 does to a text."""
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(size, 24, generator=generator).double() for size in (5, 6))
    topk_weights_TK, topk_ids_TK, shared = router_of(weight, ExpertsConfig(6, 8, RouterRule(3, "softmax")))(x)
    want_TE = (x @ weight.T).softmax(-1)
    torch.testing.assert_close(topk_weights_TK, want_TE.gather(1, topk_ids_TK), atol=1e-14, rtol=1e-12)
    assert shared is None


def test_a_router_of_16_bits_computes_in_32() -> None:
    """Keeps out: logits rounded to bfloat16, by which experts change places that transformers tells apart."""
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(size, 64, generator=generator).bfloat16() for size in (50, 16))
    want_TK, ids_TK = (x.float() @ weight.float().T).softmax(-1).topk(3)
    topk_weights_TK, topk_ids_TK, _ = router_of(weight, ExpertsConfig(16, 8, RouterRule(3, "softmax")))(x)
    assert topk_weights_TK.dtype == torch.float32 and torch.equal(topk_ids_TK, ids_TK)
    torch.testing.assert_close(topk_weights_TK, want_TK, atol=1e-6, rtol=1e-5)


def test_one_more_row_weighs_the_shared_experts() -> None:
    """Keeps out: a gate that is chosen as an expert, or a softmax that it takes part in."""
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(size, 24, generator=generator) for size in (5, 7))
    weight[6] *= 50
    alone = router_of(weight[:6], ExpertsConfig(6, 8, RouterRule(3, "softmax")))(x)
    both = router_of(weight, ExpertsConfig(6, 8, RouterRule(3, "softmax"), shared_size=8, shared_gated=True))(x)
    torch.testing.assert_close(both[0], alone[0])
    assert torch.equal(both[1], alone[1])
    torch.testing.assert_close(both[2], (x @ weight[6:].T).sigmoid())


def test_a_router_may_have_a_bias_and_stay_wide() -> None:
    """Keeps out: a bias added after the choice; a router rounded to its model's 16 bits, which gpt-oss's is not."""
    generator = torch.Generator().manual_seed(1)
    router = Router(24, ExpertsConfig(6, 8, RouterRule(2, "softmax of chosen", biased=True), kept_float32=True))
    weight, bias, x = (torch.randn(size, generator=generator) for size in ((6, 24), (6,), (5, 24)))
    router.weight, router.bias_E = nn.Buffer(weight), nn.Buffer(3 * bias)
    best_TK, ids_TK = (x @ weight.T + 3 * bias).topk(2)
    topk_weights_TK, topk_ids_TK, _ = router(x)
    assert torch.equal(topk_ids_TK, ids_TK) and not list(router.parameters())
    torch.testing.assert_close(topk_weights_TK, best_TK.softmax(-1))
