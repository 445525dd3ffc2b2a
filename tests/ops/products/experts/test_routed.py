"""A router in one launch, of few tokens and of many, against `choose` of logits in float64.

On a GPU in bfloat16, else in float16 under Triton's interpreter.

Shapes: T tokens, H hidden size, E experts, K experts of a token (top_k).
"""

from __future__ import annotations

import pytest
import torch
from toolkit.inside.captures import capturing
from toolkit.kernels import DEVICE, HAS_GPU, MARK, fence_new_memory
from toolkit.quantised_weights import rand

from specdec.ops.products.kernels.experts import choosing_triton
from specdec.ops.products.own_pairs import Kept, LiveRows, own_pairs
from specdec.ops.products.routing import RouterRule, RouterWeights, choose, routed
from specdec.ops.products.tiles.experts import ManyRouterTiles, RouterTiles, router_tiles

TILES = RouterTiles(4, 16, 512, 4) if HAS_GPU else RouterTiles(4, 16, 32, 4)
MANY = ManyRouterTiles(16, 32, 4, 3)
RULES = {
    "softmax": RouterRule(3, "softmax", normed=True),
    "softmax, best groups": RouterRule(3, "softmax", groups=4, top_groups=2),
    "sigmoid, added sum": RouterRule(3, "sigmoid", True, normed=True, added_sum=0.2),
    "softmax, corrected": RouterRule(3, "softmax", True, normed=True, least_sum=0.9, scaling=1.7),
    "sigmoid": RouterRule(3, "sigmoid", scaling=2.5),
    "sigmoid, groups' best two": RouterRule(3, "sigmoid", True, groups=4, top_groups=2, group_best=2, normed=True),
    "chosen": RouterRule(3, "softmax of chosen", biased=True),
}


def weights_of(rule: RouterRule, E: int, H: int, gated: bool, seed: int) -> RouterWeights:
    """gated: whether shared experts are weighed.  gpt-oss's router, which is biased, is float32."""
    generator = torch.Generator().manual_seed(seed)
    weight = rand(E + gated, H, seed=seed) / H**0.5
    bias, correction = (torch.randn(E, generator=generator).to(DEVICE) for _ in range(2))
    return RouterWeights(
        weight.float() if rule.biased else weight, bias if rule.biased else None, correction - 1 if rule.corrected else None
    )


def wanted(x: torch.Tensor, router: RouterWeights, rule: RouterRule, E: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = x.double() @ router.weight_LH.double().T
    chosen = logits[:, :E] + (0 if router.bias_E is None else router.bias_E)
    correction = None if router.correction_E is None else router.correction_E.double()
    return *choose(chosen, rule, correction), logits[:, E:].sigmoid()


@pytest.mark.slow_cases(keep=6)
@pytest.mark.parametrize(("T", "gated", "tiles"), [(5, True, TILES), (1, False, TILES), (21, True, MANY), (16, False, MANY)])
@pytest.mark.parametrize("name", RULES)
def test_one_launch_chooses_as_the_definition(
    name: str, T: int, gated: bool, tiles: RouterTiles | ManyRouterTiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keeps out: an expert of a group that was not selected, weights of corrected scores, a sum taken before the choice, a gate
    of shared experts that is chosen, columns, rows or tokens beyond the last one, and writes there.
    """
    rule, E, H = RULES[name], 12, 40
    x, router = 2 * rand(T, H + 8, seed=T)[:, 8:], weights_of(rule, E, H, gated, T)
    fences = [] if HAS_GPU else fence_new_memory(choosing_triton, monkeypatch)
    with torch.inference_mode():
        topk_weights_TK, topk_ids_TK, shared_T1 = routed(x, router, rule, E, tiles)
    want_TK, want_ids_TK, want_shared_T1 = wanted(x, router, rule, E)
    assert torch.equal(topk_ids_TK, want_ids_TK)
    torch.testing.assert_close(topk_weights_TK.double(), want_TK, atol=1e-5, rtol=1e-5)
    assert (shared_T1 is not None) == gated
    if shared_T1 is not None:
        torch.testing.assert_close(shared_T1.double(), want_shared_T1, atol=1e-5, rtol=1e-5)
    assert all(bool((fence == MARK).all()) for fence in fences)


@pytest.mark.parametrize("tiles", [TILES, MANY])
@pytest.mark.parametrize("columns", [1, 3])
def test_pairs_are_skipped_as_afterwards(columns: int, tiles: RouterTiles | ManyRouterTiles) -> None:
    """Keeps out: experts of other ranks that are computed here, and tokens of padded rows or after a row's last one."""
    rule, x = RULES["softmax"], rand(3 * columns, 40)
    router, active_B = weights_of(rule, 12, 40, False, 1), torch.tensor([1, 0, 1], dtype=torch.int32, device=DEVICE)
    kept = Kept(range(3, 9), LiveRows(active_B, torch.tensor([1, 2, 0], device=DEVICE)))
    with torch.inference_mode():
        alone, got = routed(x, router, rule, 12, tiles), routed(x, router, rule, 12, tiles, kept)
    weights_TK, ids_TK = own_pairs(*alone[:2], *kept)
    assert torch.equal(got[0], weights_TK) and torch.equal(got[1], ids_TK) and 0 < int((ids_TK == 6).sum()) < ids_TK.numel()


@pytest.mark.parametrize("tiles", [TILES, MANY])
@pytest.mark.parametrize("name", ["softmax", "sigmoid, groups' best two"])
def test_ties_go_to_the_lower_index_and_nan_names_experts(name: str, tiles: RouterTiles | ManyRouterTiles) -> None:
    """Keeps out: the higher of two equal experts; ids that are none where a row holds NaN; NaN beside a row."""
    rule = RULES[name]
    router, x = RouterWeights(rand(2, 40).repeat_interleave(6, 0), None, None), rand(3, 40, seed=1)
    if rule.corrected:
        router = router._replace(correction_E=torch.zeros(12, device=DEVICE))
    x[1] = torch.nan
    with torch.inference_mode():
        topk_weights_TK, topk_ids_TK, _ = routed(x, router, rule, 12, tiles)
    logits = x.double() @ router.weight_LH.double().T
    for token in (0, 2):
        first = 6 * int(logits[token, 6] > logits[token, 0])
        assert topk_ids_TK[token].tolist() == [first, first + 1, first + 2]
    assert len(set(topk_ids_TK[1].tolist()) & set(range(12))) == 3
    assert bool(topk_weights_TK[[0, 2]].isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("E", "H", "rule"),
    [
        (128, 2048, RouterRule(8, "softmax", normed=True)),
        (256, 2048, RouterRule(8, "softmax", normed=True)),
        (256, 7168, RouterRule(8, "sigmoid", True, groups=8, top_groups=4, group_best=2, normed=True, scaling=2.5)),
        (32, 2880, RouterRule(4, "softmax of chosen", biased=True)),
    ],
)
def test_published_sizes_and_replays(E: int, H: int, rule: RouterRule) -> None:
    """Keeps out: arrivals that are not set back, and partial logits of the replay before."""
    router = weights_of(rule, E, H, True, 3)
    for T in (1, 6, 17, 48, 192, 300, 5000):
        x, tiles = rand(T, H), router_tiles(T, E)
        with torch.inference_mode():
            routed(x, router, rule, E, tiles)
            graph = torch.cuda.CUDAGraph()
            with capturing(graph):
                got = routed(x, router, rule, E, tiles)
            for seed in range(3):
                x.copy_(rand(T, H, seed=seed))
                graph.replay()
                want = wanted(x, router, rule, E)
                assert float((got[1] == want[1]).float().mean()) > 0.99  # near ties alone may differ
                torch.testing.assert_close(got[0].double().sort().values, want[0].sort().values, atol=1e-4, rtol=1e-3)
