"""A single token's router and the norm in front of it in one launch, against the definitions of both.

On a GPU in bfloat16, else in float16 under Triton's interpreter.

Shapes: H hidden size, E experts, S splits of what is added.
"""

from __future__ import annotations

import pytest
import torch
from toolkit.kernels import DEVICE, MARK, fence_new_memory
from toolkit.one_token import RULES, of_one, router_of
from toolkit.quantised_weights import rand

from specdec.ops.norm import rms_norm
from specdec.ops.products.kernels.experts import choosing_triton, norm_router_triton
from specdec.ops.products.own_pairs import own_pairs
from specdec.ops.products.partials import Partials
from specdec.ops.products.routing import choose, normed_routed


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
    delta = rand(1, H, seed=7) if S == 1 else Partials(torch.randn(S, 1, H).to(DEVICE), x.dtype)
    fences = [] if DEVICE.type == "cuda" else fence_new_memory(choosing_triton, monkeypatch)
    fences = fences or fence_new_memory(norm_router_triton, monkeypatch)
    with torch.inference_mode():
        total, normed, found = normed_routed(x, delta, norm, 1e-5, router, how, E)
        waiting = normed_routed(x, delta, norm, 1e-5, router, how, E, chooses=False)[2]
    want = x + (delta.tensor() if isinstance(delta, Partials) else delta)
    assert torch.equal(total, want)
    exact = rms_norm(want.double().cpu(), norm.double().cpu(), 1e-5)
    assert float((normed.double().cpu() - exact).norm() / exact.norm()) < 6e-3
    logits = normed.double() @ router.weight_LH.double().T
    assert float((waiting.parts[0, :E].double() - logits[0]).norm() / logits.norm()) < 1e-5
    logits = logits + (0 if router.bias_E is None else router.bias_E)
    weights_1K, ids_1K = choose(logits, how, None if router.correction_E is None else router.correction_E.double())
    assert torch.equal(found.out[1], ids_1K)
    torch.testing.assert_close(found.out[0].double(), weights_1K, atol=1e-5, rtol=1e-5)
    assert all(bool((fence == MARK).all()) for fence in fences)


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
