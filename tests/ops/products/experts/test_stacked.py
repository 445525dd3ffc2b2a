"""Products of heads and experts in one order of sums.

On a GPU in bfloat16, else in float16 under Triton's interpreter.

Shapes: T tokens, E experts, K experts of a token, B matrices.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from toolkit.kernels import DEVICE, HAS_GPU
from torch import Tensor

from specdec.models.mixtures.products import masked_experts, ordered_experts
from specdec.models.mixtures.router import Router
from specdec.models.mixtures.rules import ExpertsConfig
from specdec.ops.products.experts import PLAIN, Form, Relu2, SwiGLU, inputs_of
from specdec.ops.products.kernels.experts.by_expert_triton import (
    launch_by_expert,
    launch_by_expert_many,
    launch_place_pairs,
)
from specdec.ops.products.numerics import INVARIANT
from specdec.ops.products.routing import RouterRule
from specdec.ops.products.stacked import each_linear, spread_rows, weighted_sum
from specdec.ops.products.tiles.experts import StackedTiles

DTYPE = torch.bfloat16 if HAS_GPU else torch.float16
SMALL = None if HAS_GPU else StackedTiles(4, 16, 16, 4, 2)  # the interpreter takes long for large tiles


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(0.3).to(DEVICE, DTYPE)


def choice(T: int, E: int, K: int) -> tuple[Tensor, Tensor]:
    """Weights and numbers of experts.  No token chooses expert 1, and all choose expert 0."""
    scores_TE = torch.rand(T, E, generator=torch.Generator().manual_seed(T))
    scores_TE[:, 1], scores_TE[:, 0] = -1, 2
    return torch.rand(T, K).to(DEVICE), scores_TE.topk(K).indices.to(DEVICE)


def clamped(E: int, F: int, H: int) -> Form:
    """gpt-oss's form, with a limit that many gates and ups exceed."""
    return Form(SwiGLU(1.702, 0.5), rand(E, 2 * F, seed=3), rand(E, H, seed=4))


@pytest.mark.parametrize(
    ("T", "K", "form"), [(7, 2, PLAIN), (1, 3, PLAIN), (7, 2, clamped(5, 24, 40))], ids=["7-2", "1-3", "clamped"]
)
def test_experts_equal_the_definition(T: int, K: int, form: Form) -> None:
    """Keeps out: rows of another expert in a tile, an expert without rows, gates taken for ups, weights of other pairs, biases
    of another expert or after the gate."""
    gate_up, down, x = rand(5, 2 * 24, 40), rand(5, 40, 24, seed=1), rand(T, 40, seed=2)
    topk_weights_TK, topk_ids_TK = choice(T, 5, K)
    biases = [None if bias is None else bias.double() for bias in (form.gate_up_bias, form.down_bias)]
    wide = x.double(), topk_weights_TK.double(), topk_ids_TK, gate_up.double(), down.double()
    want = masked_experts(*wide, Form(form.activation, *biases))
    with torch.inference_mode():
        got = ordered_experts(x, topk_weights_TK, topk_ids_TK, gate_up, down, form, SMALL)
    assert got.dtype == DTYPE and (got.double() - want).norm() < 6e-3 * want.norm()


def test_experts_without_a_gate_equal_the_definition() -> None:
    """Keeps out: rows that are taken for a gate's, and a square of a number below 0."""
    up, down, x = rand(5, 24, 40), rand(5, 40, 24, seed=1), rand(7, 40, seed=2)
    (topk_weights_TK, topk_ids_TK), form = choice(7, 5, 2), Form(Relu2())
    want = masked_experts(x.double(), topk_weights_TK.double(), topk_ids_TK, up.double(), down.double(), form)
    with torch.inference_mode():
        got = ordered_experts(x, topk_weights_TK, topk_ids_TK, up, down, form, SMALL)
    assert got.dtype == DTYPE and (got.double() - want).norm() < 6e-3 * want.norm()


@pytest.mark.parametrize(
    ("P", "launch"), [(6, launch_by_expert), (700, launch_by_expert), (6, launch_by_expert_many), (1700, launch_by_expert_many)]
)
def test_pairs_are_sorted_by_expert(P: int, launch: Callable[[Tensor, int], tuple[Tensor, Tensor]]) -> None:
    """Keeps out: pairs of an expert in another order than torch's stable sort has, and an expert nobody chose; skipped pairs
    that are counted."""
    ids_P = torch.randint(0, 5, (P,), generator=torch.Generator().manual_seed(P)).to(DEVICE)
    ids_P[ids_P == 2] = 5  # which is no expert
    order_P, counts_E = launch(ids_P, 5)
    assert torch.equal(order_P, ids_P.argsort(stable=True))
    assert torch.equal(counts_E, torch.bincount(ids_P, minlength=6)[:5].int())


@pytest.mark.parametrize("P", [6, 1700])
def test_pairs_have_places_in_tiles_of_one_expert(P: int) -> None:
    """Keeps out: a pair in another expert's rows or a later one of an expert in front of an earlier one; a tile that no expert
    or a wrong one has, or that ends late; a place of a skipped pair.
    """
    E, align, tile = 5, 8, 16
    ids_P = torch.randint(0, E, (P,), generator=torch.Generator().manual_seed(P)).to(DEVICE)
    ids_P[ids_P == 2] = E  # which is no expert
    places_P, table_R4 = launch_place_pairs(ids_P, E, align, tile)
    want_P, want, begin = torch.full_like(places_P, -1), [], 0
    for expert in range(E):
        own = (ids_P == expert).nonzero()[:, 0]
        want_P[own] = begin + torch.arange(len(own), dtype=torch.int32, device=DEVICE)
        want += [[expert, begin + at, min(len(own) - at, tile)] for at in range(0, len(own), tile)]
        begin += -(-len(own) // align) * align
    assert torch.equal(places_P, want_P)
    assert int(table_R4[0, 0]) == len(want) < len(table_R4) and table_R4[1 : 1 + len(want), :3].tolist() == want


def test_rows_of_placed_pairs_are_added_up() -> None:
    """Keeps out: a pair's row that is taken for another's, the row of a skipped pair, which nobody has written."""
    x, weights_TK = rand(5, 40), torch.rand(5, 2, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    places_P = torch.randperm(13, generator=torch.Generator().manual_seed(2))[:10].int().to(DEVICE)
    weights_TK[2, 1], places_P[5] = 0, -1
    with torch.inference_mode():
        rows = spread_rows(x, places_P, 13)
        assert torch.equal(rows[places_P[places_P >= 0].long()], x.repeat_interleave(2, 0)[places_P >= 0])
        got = weighted_sum(rows, weights_TK, places_P)
    of_pairs = x.double()[:, None].expand(-1, 2, -1)
    torch.testing.assert_close(got.double(), (of_pairs * weights_TK[..., None]).sum(1), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("along", [True, False], ids=["rows", "columns"])
def test_each_matrix_equals_the_definition(along: bool) -> None:
    """Keeps out: matrices that lie transposed read as they are, strided rows, columns beyond the last one."""
    weight = rand(3, 20, 24) if along else rand(3, 24, 20).transpose(1, 2)
    x = rand(5, 3, 30, seed=1)[..., 6:]
    got, want = each_linear(x, weight, torch.float32, SMALL), torch.einsum("tbk,bnk->tbn", x.double(), weight.double())
    assert got.dtype == torch.float32 and (got.double() - want).norm() < 1e-3 * want.norm()


GROUPED = RouterRule(3, "sigmoid", True, groups=4, top_groups=2, group_best=2, normed=True, scaling=2.5)
ROUTERS = [
    ExpertsConfig(8, 8, GROUPED, shared_size=8, shared_gated=True),
    ExpertsConfig(8, 8, RouterRule(3, "softmax", True, normed=True, least_sum=0.6), kept_float32=True),  # ERNIE's
    ExpertsConfig(8, 8, RouterRule(3, "softmax of chosen", biased=True), kept_float32=True),  # gpt-oss's
]


@pytest.mark.parametrize("config", ROUTERS, ids=["grouped", "float32", "biased"])
def test_a_router_chooses_as_its_definition(config: ExpertsConfig) -> None:
    """Keeps out: logits or weights rounded to 16 bits on the way, by which near experts change places; a bias left out."""
    router = Router(40, config).to(DEVICE).requires_grad_(False)
    router.weight.copy_(torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(0)))
    router.weight = router.weight if config.kept_float32 else torch.nn.Parameter(router.weight.to(DTYPE), requires_grad=False)
    router.correction_E = rand(8, seed=1).float() if config.router.corrected else None
    router.bias_E = rand(8, seed=3).float() if config.router.biased else None
    x = rand(9, 40, seed=2)
    want = [None if part is None else part.double() for part in router.double()(x.double())]
    router.float() if config.kept_float32 else router.to(DTYPE)
    if router.correction_E is not None:
        router.correction_E = router.correction_E.float()
    router.numerics = INVARIANT
    for got, right in zip(router(x), want, strict=True):
        assert right is None or torch.allclose(got.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("H", "F", "E", "K"), [(2048, 1408, 64, 6), (7168, 2048, 16, 8), (64, 48, 8, 2), (2880, 2880, 8, 4), (2688, 1856, 16, 6)]
)
def test_experts_do_not_depend_on_the_other_rows(H: int, F: int, E: int, K: int) -> None:
    """Keeps out: tiles of rows, or sums over experts, that add up in another order for another number of tokens."""
    form = clamped(E, F, H) if H == 2880 else Form(Relu2()) if H == 2688 else PLAIN
    gate_up, down, x = rand(E, inputs_of(form.activation) * F, H), rand(E, H, F, seed=1), rand(1500, H, seed=2)
    topk_weights_TK, topk_ids_TK = choice(1500, E, K)
    with torch.inference_mode():
        whole = ordered_experts(x, topk_weights_TK, topk_ids_TK, gate_up, down, form)
        for T in (1, 2, 6, 8, 17, 32, 60, 100, 256, 700):
            part = slice(1500 - T, 1500)
            assert torch.equal(
                ordered_experts(x[part], topk_weights_TK[part], topk_ids_TK[part], gate_up, down, form), whole[part]
            ), T


@pytest.mark.gpu
@pytest.mark.parametrize(("B", "O", "I", "along"), [(128, 512, 128, False), (128, 128, 512, True), (1, 256, 7168, True)])
def test_heads_do_not_depend_on_the_other_rows(B: int, O: int, I: int, along: bool) -> None:
    """Keeps out: a head's product, or a router's, whose order of sums changes with the number of tokens."""
    weight = rand(B, O, I) if along else rand(B, I, O).transpose(1, 2)
    x = rand(700, B, I, seed=1)
    whole = each_linear(x, weight, DTYPE)
    want = torch.einsum("tbk,bnk->tbn", x[:50].float(), weight.float())
    assert (whole[:50].float() - want).norm() < 6e-3 * want.norm()
    for T in (1, 2, 6, 8, 17, 32, 60, 100, 256):
        assert torch.equal(each_linear(x[700 - T :], weight, DTYPE), whole[700 - T :]), T


@pytest.mark.gpu
@pytest.mark.parametrize(("E", "H"), [(32, 2880), (64, 2560), (192, 4096)])
def test_a_float32_router_does_not_depend_on_the_other_rows(E: int, H: int) -> None:
    """Keeps out: threads that share an element's columns, or a product in TF32."""
    weight, x = rand(1, E, H).float(), rand(700, 1, H, seed=1).float()
    whole = each_linear(x, weight, torch.float32)
    want = torch.einsum("tbk,bnk->tbn", x.double(), weight.double())
    assert (whole.double() - want).norm() < 1e-5 * want.norm()
    for T in (1, 2, 6, 8, 17, 32, 60, 100, 256):
        assert torch.equal(each_linear(x[700 - T :], weight, torch.float32), whole[700 - T :]), T
