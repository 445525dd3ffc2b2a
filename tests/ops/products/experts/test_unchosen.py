"""Experts' kernels that choose a single token's experts themselves, against the router that chooses, and float64.

On a GPU in bfloat16, else in float16 under Triton's interpreter.

Shapes: H hidden size, E experts, K experts of a token (top_k), F intermediate size of an expert.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from toolkit.inside.captures import capturing
from toolkit.kernels import DEVICE, HAS_GPU, MARK, fence_new_memory
from toolkit.quantised_weights import FORMS, error, exact_mixture, experts_of, rand
from torch import Tensor

from specdec.ops.products.experts import (
    DenseExperts,
    Experts,
    Form,
    SharedExperts,
    SwiGLU,
    few_tokens_experts,
    mixture_tiles,
)
from specdec.ops.products.kernels.experts import choosing_triton
from specdec.ops.products.numerics import FAST
from specdec.ops.products.own_pairs import Kept, LiveRows
from specdec.ops.products.routing import RouterRule, RouterWeights, may_wait, routed, router_tiles, unchosen
from specdec.ops.products.tiles.experts import ExpertTiles, MixtureTiles, RouterTiles, few_hopper_tiles, few_tokens_tiles

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
NEAR = 6e-3 if HAS_GPU else 1e-3
TILES = RouterTiles(4, 16, 512, 4) if HAS_GPU else RouterTiles(4, 16, 32, 4)
RULES = {
    "softmax": RouterRule(3, "softmax"),
    "softmax, normed": RouterRule(3, "softmax", normed=True, scaling=1.7),
    "sigmoid, corrected": RouterRule(3, "sigmoid", True, groups=1, top_groups=1, normed=True, scaling=1.8),
    "least sum": RouterRule(3, "softmax", True, normed=True, least_sum=0.9),
    "chosen": RouterRule(3, "softmax of chosen", biased=True),
}


def router_of(rule: RouterRule, E: int, H: int, seed: int = 1) -> RouterWeights:
    weight, bias = rand(E, H, seed=seed) / H**0.5, torch.randn(E, device=DEVICE)
    return RouterWeights(
        weight.float() if rule.biased else weight, bias if rule.biased else None, bias if rule.corrected else None
    )  # fmt: skip


def tiles_of(kind: str, hopper: bool) -> MixtureTiles:
    if hopper:
        return few_hopper_tiles(1, "int4" if kind == "int4" else "e2m1")
    if HAS_GPU:
        return few_tokens_tiles(1, "dense" if kind == "dense" else FORMS[kind].kind)
    return MixtureTiles("few_tokens_triton", ExpertTiles(8, 64, 4, 2, 1), ExpertTiles(8, 128, 4, 2, 1, 2))


def made(name: str, E: int, H: int, F: int) -> Experts:
    if name != "dense":
        return experts_of(FORMS[name], E, H, F, SwiGLU(1.7, 7.0) if name == "mxfp4" else None)
    return DenseExperts(rand(E, 2 * F, H, seed=7) / 4, rand(E, H, F, seed=8) / 4, Form(SwiGLU()))


def check(name: str, rule: RouterRule, kept: Kept | None, shared: SharedExperts | None, hopper: bool, H: int, F: int) -> None:
    E = 12
    held = len(kept.own) if kept else E
    experts, router, x = made(name, held, H, F), router_of(rule, E, H), rand(1, H, seed=5)
    tiles = tiles_of(name, hopper)
    with torch.inference_mode():
        want_1K, ids_1K, _ = routed(x, router, rule, E, TILES, kept)
        choice = unchosen(x, router, rule, E, kept)
        got_1K, got_ids_1K, _ = choice.out
        got_1K.fill_(torch.nan)
        got_ids_1K.fill_(-7)
        got = few_tokens_experts(x, got_1K, got_ids_1K, experts, tiles, shared, choice=choice)
        again = few_tokens_experts(x, want_1K, ids_1K, experts, tiles, shared)
    assert torch.equal(got_ids_1K, ids_1K)
    torch.testing.assert_close(got_1K, want_1K, atol=1e-6, rtol=1e-5)
    assert isinstance(got, Tensor) and isinstance(again, Tensor)
    torch.testing.assert_close(got, again, atol=1e-3, rtol=1e-2)
    here_1K = ids_1K < held
    if shared is None and bool(here_1K.any()):
        assert error(got, exact_mixture(x, want_1K * here_1K, ids_1K.clamp(max=held - 1), experts)) < NEAR


@pytest.mark.parametrize("rule", RULES)
def test_kernels_choose_what_the_router_does(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: another expert or weight than the router's, a weight of fewer places than all, another pair's, a bias or a
    correction of another expert, writes elsewhere.
    """
    fences = [] if HAS_GPU else fence_new_memory(choosing_triton, monkeypatch)
    check("dense", RULES[rule], None, None, False, 40, 24)
    assert all(bool((fence == MARK).all()) for fence in fences)


@pytest.mark.parametrize("name", ["fp8 blocks", "int4", "mxfp4"])
def test_of_weights_in_few_bits(name: str) -> None:
    """Keeps out: biases of down weighed by what nobody has written yet, an expert's scales of another."""
    check(name, RULES["chosen"], None, None, False, 256, 128)


@pytest.mark.parametrize("active", [0, 1])
def test_experts_elsewhere_and_rows_that_are_padding(active: int) -> None:
    """Keeps out: experts of other ranks that are computed here, numbers that count from 0, tokens of padded rows."""
    live = LiveRows(torch.tensor([active], dtype=torch.int32, device=DEVICE), torch.tensor([0], device=DEVICE))
    check("dense", RULES["softmax, normed"], Kept(range(3, 9), live), None, False, 40, 24)


def test_shared_experts_stand_beside() -> None:
    """Keeps out: a shared expert that counts as a chosen one, and a chosen one that is another entry's."""
    F, H = 24, 40
    shared = SharedExperts(rand(2 * F, H, seed=4) / 4, rand(H, F, seed=5) / 4, None, 1)
    check("dense", RULES["sigmoid, corrected"], None, shared, False, H, F)


def test_who_may_leave_the_choice_to_the_experts() -> None:
    """Keeps out: rules with groups, and weights of shared experts, which these kernels do not compute."""
    router = router_of(RULES["softmax"], 12, 40)
    assert may_wait(router, RULES["softmax"], 12) and may_wait(router, RULES["sigmoid, corrected"], 12)
    assert not may_wait(router, replace(RULES["softmax"], groups=4, top_groups=2), 12)
    assert not may_wait(router, RULES["softmax"], 11)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_HOPPER, reason="kernels for Hopper GPUs")
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["int4", "mxfp4"])
def test_kernels_for_hopper_gpus_choose_alike(name: str, rule: str) -> None:
    """Keeps out: as the first test of this file."""
    check(name, RULES[rule], None, None, True, 256, 128)
    live = LiveRows(torch.tensor([1], dtype=torch.int32, device=DEVICE), torch.tensor([0], device=DEVICE))
    check(name, RULES[rule], Kept(range(3, 9), live), None, True, 256, 128)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["dense", "fp8 blocks", "int4", "mxfp4"])
def test_published_sizes_and_replays(name: str) -> None:
    """Keeps out: logits of the replay before, which down reads before its wait."""
    H, F, E, rule = (2880, 2880, 32, RULES["chosen"]) if name == "mxfp4" else (2048, 768, 128, RULES["softmax, normed"])
    rule = replace(rule, top_k=4 if name == "mxfp4" else 8)
    experts, router, x = made(name, E, H, F), router_of(rule, E, H), rand(1, H)
    tiles, routing = mixture_tiles(x, experts, rule.top_k, FAST), router_tiles(x, router, E, FAST)
    assert tiles is not None and tiles.chooses and isinstance(routing, RouterTiles)
    with torch.inference_mode():

        def run() -> tuple[Tensor, Tensor]:
            choice = unchosen(x, router, rule, E)
            out = few_tokens_experts(x, *choice.out[:2], experts, tiles, choice=choice)
            assert isinstance(out, Tensor)
            return out, choice.out[1]

        run()
        graph = torch.cuda.CUDAGraph()
        with capturing(graph):
            first, ids = run()
            second, more_ids = run()
        for seed in range(4):
            x.copy_(rand(1, H, seed=seed))
            graph.replay()
            weights, want_ids, _ = routed(x, router, rule, E, routing)
            want = few_tokens_experts(x, weights, want_ids, experts, tiles)
            assert torch.equal(ids, want_ids) and torch.equal(more_ids, want_ids)
            assert isinstance(want, Tensor) and error(first, want) < 1e-3 and error(second, want) < 1e-3
