"""A router of one token, with the norm in front of it or without, and experts' kernels that choose its experts themselves:
against float64 and the router that chooses.

On a GPU in bfloat16, else in float16 under Triton's interpreter, which knows no kernel for Hopper GPUs.

Shapes: H hidden size, E experts, K experts of a token (top_k), F intermediate size of an expert, S splits of what a norm adds.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from toolkit.inside.captures import capturing
from toolkit.kernels import DEVICE, HAS_GPU, MARK, fence_new_memory
from toolkit.quantised_weights import FORMS, error, exact_mixture, experts_of, rand
from torch import Tensor

from specdec.ops.norm import rms_norm
from specdec.ops.products.experts import SwiGLU, few_tokens_experts, mixture_tiles
from specdec.ops.products.kernels.experts import choosing_triton, norm_router_triton
from specdec.ops.products.numerics import FAST
from specdec.ops.products.own_pairs import Kept, LiveRows, own_pairs
from specdec.ops.products.partials import Partials
from specdec.ops.products.routing import (
    RouterRule,
    RouterWeights,
    choose,
    may_wait,
    normed_routed,
    routed,
    router_tiles,
    unchosen,
)
from specdec.ops.products.tiles.experts import RouterTiles, few_hopper_tiles

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not HAS_HOPPER, reason="kernels for Hopper GPUs")
TILES = RouterTiles(4, 16, 512, 4)
RULES = {
    "softmax": RouterRule(3, "softmax"),
    "softmax, normed": RouterRule(3, "softmax", normed=True, scaling=1.7),
    "sigmoid, corrected": RouterRule(3, "sigmoid", True, groups=1, top_groups=1, normed=True, scaling=1.8),
    "least sum": RouterRule(3, "softmax", True, normed=True, least_sum=0.9),
    "chosen": RouterRule(3, "softmax of chosen", biased=True),
}


def router_of(rule: RouterRule, E: int, H: int, seed: int = 1) -> RouterWeights:
    generator = torch.Generator().manual_seed(seed)
    weight, number = rand(E, H, seed=seed) / H**0.5, torch.randn(E, generator=generator).to(DEVICE)
    return RouterWeights(
        weight.float() if rule.biased else weight, number if rule.biased else None, number if rule.corrected else None
    )  # fmt: skip


def of_one(live: int) -> Kept:
    """Experts 3 to 8 are here; live: whether the token is needed."""
    active, last = torch.tensor([live], dtype=torch.int32, device=DEVICE), torch.tensor([0], device=DEVICE)
    return Kept(range(3, 9), LiveRows(active, last))


@pytest.mark.parametrize("E", [12, 160])
@pytest.mark.parametrize("rule", RULES)
def test_a_token_alone_has_the_experts_of_the_definition(rule: str, E: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: another expert, or a weight of fewer places than all; a bias or correction of another expert; experts of runs
    beyond the first; columns, rows and writes beyond the last one; a correction that enters weights.
    """
    H, how = 1100, RULES[rule]
    router, x = router_of(how, E, H), 2 * rand(1, H, seed=5)
    fences = [] if HAS_GPU else fence_new_memory(choosing_triton, monkeypatch)
    with torch.inference_mode():
        topk_weights_1K, topk_ids_1K, shared = routed(x, router, how, E, TILES)
    logits = x.double() @ router.weight_LH.double().T + (0 if router.bias_E is None else router.bias_E)
    want_1K, want_ids_1K = choose(logits, how, None if router.correction_E is None else router.correction_E.double())
    assert shared is None and torch.equal(topk_ids_1K, want_ids_1K)
    torch.testing.assert_close(topk_weights_1K.double(), want_1K, atol=1e-5, rtol=1e-5)
    assert all(bool((fence == MARK).all()) for fence in fences)


@pytest.mark.parametrize("live", [0, 1])
def test_pairs_of_a_token_alone_are_skipped_as_afterwards(live: int) -> None:
    """Keeps out: experts of other ranks that are computed here, numbers that count from 0, tokens of padded rows."""
    rule, kept, x = RULES["softmax, normed"], of_one(live), rand(1, 40, seed=4)
    router = router_of(rule, 12, 40)
    with torch.inference_mode():
        alone, got = routed(x, router, rule, 12, TILES), routed(x, router, rule, 12, TILES, kept)
    weights_1K, ids_1K = own_pairs(*alone[:2], *kept)
    assert torch.equal(got[0], weights_1K) and torch.equal(got[1], ids_1K) and bool((ids_1K == 6).all()) == (not live)


def test_ties_and_nan_of_a_token_alone() -> None:
    """Keeps out: the higher of two equal experts; ids that are none where logits are NaN."""
    router, rule, x = RouterWeights(rand(2, 40).repeat_interleave(6, 0), None, None), RULES["softmax"], rand(1, 40, seed=1)
    with torch.inference_mode():
        ids, of_nan = routed(x, router, rule, 12, TILES)[1], routed(x * torch.nan, router, rule, 12, TILES)[1]
    logits = x.double() @ router.weight_LH.double().T
    first = 6 * int(logits[0, 6] > logits[0, 0])
    assert ids[0].tolist() == [first, first + 1, first + 2] and len(set(of_nan[0].tolist()) & set(range(12))) == 3


def test_logits_that_wait_are_whole() -> None:
    """Keeps out: parts of columns that two splits have, or none, and experts that are chosen twice."""
    rule, x = RULES["chosen"], rand(1, 2100, seed=2)
    router = router_of(rule, 12, 2100)
    with torch.inference_mode():
        waiting = unchosen(x, router, rule, 12)
    assert waiting.parts.shape == (3, 16) and waiting.rule.SPLITS == 3
    assert error(waiting.parts.sum(0)[:12], (x.double() @ router.weight_LH.double().T)[0]) < 1e-5


def test_who_may_leave_the_choice_to_the_experts() -> None:
    """Keeps out: rules with groups, and weights of shared experts, which these kernels do not compute."""
    router = router_of(RULES["softmax"], 12, 40)
    assert may_wait(router, RULES["softmax"], 12) and may_wait(router, RULES["sigmoid, corrected"], 12)
    assert not may_wait(router, replace(RULES["softmax"], groups=4, top_groups=2), 12)
    assert not may_wait(router, RULES["softmax"], 11)


@pytest.mark.parametrize(("H", "E", "S"), [(1100, 12, 1), (40, 160, 3), (300, 12, 6)])
@pytest.mark.parametrize("rule", RULES)
def test_a_norm_and_a_router_equal_their_definitions(
    rule: str, H: int, E: int, S: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keeps out: a norm of a part of the row, or of the stream without what is added; a sum or a norm that nobody stores;
    logits of the row before its norm; rows of the weight that no program has; columns and experts beyond the last one.
    """
    how, x, norm = RULES[rule], 2 * rand(1, H, seed=5), 1 + rand(H, seed=6) / 4
    router = router_of(how, E, H)
    delta = rand(1, H, seed=7) if S == 1 else Partials(rand(S, 1, H, seed=7).float(), x.dtype)
    fences = [] if HAS_GPU else fence_new_memory(choosing_triton, monkeypatch)
    more = fence_new_memory(norm_router_triton, monkeypatch)
    with torch.inference_mode():
        total, normed, found = normed_routed(x, delta, norm, 1e-5, router, how, E)
        waiting = normed_routed(x, delta, norm, 1e-5, router, how, E, chooses=False)[2]
    want = x + (delta.tensor() if isinstance(delta, Partials) else delta)
    if S <= 4:  # more splits are added up in another order
        assert torch.equal(total, want)
    torch.testing.assert_close(total, want, atol=2e-2, rtol=1e-2)
    exact = rms_norm(total.double().cpu(), norm.double().cpu(), 1e-5)
    assert float((normed.double().cpu() - exact).norm() / exact.norm()) < 6e-3
    logits = normed.double() @ router.weight_LH.double().T
    assert float((waiting.parts[0, :E].double() - logits[0]).norm() / logits.norm()) < 1e-5
    logits = logits + (0 if router.bias_E is None else router.bias_E)
    weights_1K, ids_1K = choose(logits, how, None if router.correction_E is None else router.correction_E.double())
    assert torch.equal(found.out[1], ids_1K)
    torch.testing.assert_close(found.out[0].double(), weights_1K, atol=1e-5, rtol=1e-5)
    assert all(bool((fence == MARK).all()) for fence in (*fences, *more))


@pytest.mark.parametrize("live", [0, 1])
def test_pairs_are_skipped_as_afterwards(live: int) -> None:
    """Keeps out: experts of other ranks that are computed here, and tokens of padded rows."""
    rule, x, delta, norm = RULES["softmax, normed"], rand(1, 40, seed=4), rand(1, 40, seed=1), rand(40)
    router, kept = router_of(rule, 12, 40), of_one(live)
    with torch.inference_mode():
        alone = normed_routed(x, delta, norm, 1e-5, router, rule, 12)[2]
        got = normed_routed(x, delta, norm, 1e-5, router, rule, 12, kept)[2]
    weights_1K, ids_1K = own_pairs(*alone.out[:2], *kept)
    assert torch.equal(got.out[0], weights_1K) and torch.equal(got.out[1], ids_1K)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["int4", "mxfp4", "fp8 blocks"])
def test_kernels_choose_what_the_router_does(name: str, rule: str) -> None:
    """Keeps out: another pair's expert or weight; down's biases weighed by what nobody has written yet; ids that nobody
    writes; and what the second test of this file keeps out.
    """
    E, H, F, how = 12, 256, 128, RULES[rule]
    for kept in (None, of_one(1), of_one(0)):
        held = len(kept.own) if kept else E
        experts = experts_of(FORMS[name], held, H, F, SwiGLU(1.7, 7.0) if name == "mxfp4" else None)
        router, x, tiles = router_of(how, E, H), rand(1, H, seed=5), few_hopper_tiles(1, experts.gate_up.kind)
        with torch.inference_mode():
            want_1K, ids_1K, _ = routed(x, router, how, E, TILES, kept)
            choice = unchosen(x, router, how, E, kept)
            choice.out[0].fill_(torch.nan)
            choice.out[1].fill_(-7)
            got = few_tokens_experts(x, *choice.out[:2], experts, tiles, choice=choice)
        assert torch.equal(choice.out[1], ids_1K)
        torch.testing.assert_close(choice.out[0], want_1K, atol=1e-6, rtol=1e-5)
        want = exact_mixture(x, want_1K * (ids_1K < held), ids_1K.clamp(max=held - 1), experts)
        assert isinstance(got, Tensor) and (got.double() - want).norm() <= 6e-3 * max(float(want.norm()), 1e-6)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(("name", "E", "H", "F"), [("int4", 128, 2048, 768), ("fp8 blocks", 48, 1024, 256)])
def test_published_sizes_and_replays(name: str, E: int, H: int, F: int) -> None:
    """Keeps out: logits of the replay before, which down reads before its wait; another layer's, whose memory is used again."""
    rule = RouterRule(8, "softmax", normed=True)
    experts, router, x = experts_of(FORMS[name], E, H, F, None), router_of(rule, E, H), rand(1, H)
    with torch.inference_mode():  # otherwise the policy has no tiles: kernels record no gradient
        tiles = mixture_tiles(x, experts, rule.top_k, FAST)
        assert tiles is not None and tiles.chooses and isinstance(router_tiles(x, router, E, FAST), RouterTiles)

        def run() -> tuple[Tensor, Tensor]:
            choice = unchosen(x, router, rule, E)
            out = few_tokens_experts(x, *choice.out[:2], experts, tiles, choice=choice)
            assert isinstance(out, Tensor)
            return out, choice.out[1]

        run()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            layers = [run() for _ in range(3)]
        for seed in range(16):
            x.copy_(rand(1, H, seed=seed))
            graph.replay()
            weights, want_ids, _ = routed(x, router, rule, E, TILES)
            want = few_tokens_experts(x, weights, want_ids, experts, tiles._replace(chooses=False))
            assert isinstance(want, Tensor)
            for out, ids in layers:
                assert torch.equal(ids, want_ids) and error(out, want.double()) < 1e-3
