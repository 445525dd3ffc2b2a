"""Mixtures of up to 8 tokens by the kernels for Hopper GPUs, against float64 there; elsewhere what can be seen.

Shapes: T tokens, H hidden size, E experts, K experts of a token (top_k), F intermediate size of an expert.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from toolkit.inside.captures import capturing
from toolkit.kernels import MARK, fence_new_memory
from toolkit.quantised_weights import FORMS, choice, error, exact_mixture, experts_of, rand
from torch import Tensor

from specdec.ops.products.experts import QuantisedExperts, Relu2, SharedOutput, SwiGLU, few_tokens_experts
from specdec.ops.products.formats.experts import has_units
from specdec.ops.products.partials import Partials
from specdec.ops.products.tiles.experts import ExpertTiles, MixtureTiles, few_hopper_tiles, mixture_tiles

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not HAS_HOPPER, reason="kernels for Hopper GPUs")
NAMES = "int4", "mxfp4", "fp8 blocks", "fp8 rows"
RELU2 = "int4 relu2", "mxfp4 relu2"
QWEN, GPT_OSS, NEMOTRON = (2048, 768, 128, 8), (2880, 2880, 32, 4), (2688, 1856, 128, 6)


def experts_named(name: str, E: int, H: int, F: int) -> QuantisedExperts:
    """A form of FORMS; with " relu2" without gates."""
    activation = Relu2() if name in RELU2 else SwiGLU(1.7, 7.0) if name == "mxfp4" else None
    return experts_of(FORMS[name.removesuffix(" relu2")], E, H, F, activation)


def tiles_of(gate_up: tuple[int, int, int], down: tuple[int, int, int, int]) -> MixtureTiles:
    """Of gate and up: rows, warps and units; of down: splits, too."""
    (n, warps, units), (rows, slices, ahead, splits) = gate_up, down
    first, second = ExpertTiles(8, n, warps, 1, units, 1, warps), ExpertTiles(8, rows, slices, 1, ahead, splits, slices)
    return MixtureTiles("few_hopper", first, second)


def test_forms_that_the_kernels_take() -> None:
    """Keeps out: zero points that are not subtracted, scales of 32 columns of a unit of 128, rows that no tile has."""
    for name in FORMS:
        assert has_units(experts_named(name, 2, 160, 64).down) == (name in NAMES), name
    assert not has_units(experts_named("mxfp4", 2, 72, 64).gate_up)


def test_warps_share_a_token_s_experts_evenly() -> None:
    """Keeps out: a token of ten experts, which slices of the second product cannot share: its pass ended in an assertion."""
    for kind, T, K in itertools.product(("int4", "e2m1"), (1, 8), range(1, 17)):
        tiles = mixture_tiles(T, K, 128, kind, hopper=True)
        assert tiles is not None and (tiles.kernel == "few_hopper") == (K <= 8 and (T == 1 or kind == "int4"))
        if tiles.kernel == "few_hopper":
            assert T * K <= 64 and (T > 1 or tiles.down.warps * tiles.down.splits % (1 << (K - 1).bit_length()) == 0)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("T", [1, 5, 8])
@pytest.mark.parametrize("name", NAMES + RELU2)
def test_a_mixture_equals_its_definition(name: str, T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: rows of another expert or token, gates taken for ups, columns in another order than x's, columns beyond the
    last one, units that two slices have or none, a scale of another group, activations that nobody wrote, writes beyond
    the end.
    """
    from specdec.ops.products.kernels.quantised import few_hopper

    H, F, K = (160, 320, 2) if name.startswith("mxfp4") else (384, 128, 3)
    experts = experts_named(name, 5, H, F)
    x, (topk_weights_TK, topk_ids_TK) = rand(T, H, seed=2) / 8, choice(T, 5, K)
    fences = fence_new_memory(few_hopper, monkeypatch)
    want = exact_mixture(x, topk_weights_TK, topk_ids_TK, experts)
    for tiles in (
        tiles_of((16, 2, 2), (16, 4, 3, 1)), tiles_of((32, 4, 1), (16, 8, 2, 2)), tiles_of((64, 1, 3), (64, 2, 1, 2)),
        few_hopper_tiles(T, experts.gate_up.kind),
    ):  # fmt: skip
        with torch.inference_mode():
            got = few_tokens_experts(x, topk_weights_TK, topk_ids_TK, experts, tiles)
        assert isinstance(got, Tensor) and error(got, want) < 6e-3, tiles
    assert all(bool((fence == MARK).all()) for fence in fences)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("T", [1, 5])
def test_shared_experts_and_experts_elsewhere(T: int) -> None:
    """Keeps out: a term that each split adds, a gate of another token, partials whose sum is not the product, and the row of an
    expert that other ranks have: an id that is none of this rank's adds nothing, also where it is a token's only one.
    """
    experts, x, (topk_weights_TK, topk_ids_TK) = experts_named("int4", 4, 128, 128), rand(T, 128, seed=3), choice(T, 4, 3)
    shared, gate, tiles = rand(T, 128, seed=4), torch.rand(T, 1, device=x.device), tiles_of((32, 2, 1), (16, 4, 1, 2))
    away_TK = topk_ids_TK.where(torch.rand(T, 3, device=x.device) < 0.6, torch.tensor(4 if T > 1 else -1, device=x.device))
    here_TK = (away_TK >= 0) & (away_TK < 4)
    want = exact_mixture(x, topk_weights_TK * here_TK, topk_ids_TK, experts)
    with torch.inference_mode():
        alone = few_tokens_experts(x, topk_weights_TK, away_TK, experts, tiles)
        both = few_tokens_experts(x, topk_weights_TK, away_TK, experts, tiles, SharedOutput(shared, gate), partials=True)
        plain = few_tokens_experts(x, topk_weights_TK, away_TK, experts, tiles, SharedOutput(shared, None))
    assert isinstance(alone, Tensor) and isinstance(both, Partials) and isinstance(plain, Tensor)
    weighed, whole = want + shared.double() * gate.double(), want + shared.double()
    assert (alone.double() - want).norm() < 6e-3 * max(want.norm(), 1e-3)
    assert error(both.tensor(), weighed) < 6e-3 and error(plain, whole) < 6e-3


@pytest.mark.gpu
@needs_hopper
def test_a_token_does_not_depend_on_nan_beside_it() -> None:
    """Keeps out: another token's row that is multiplied by 0 instead of being left out."""
    experts, x, (topk_weights_TK, topk_ids_TK) = experts_named("int4", 4, 128, 128), rand(5, 128, seed=3), choice(5, 4, 2)
    tiles = few_hopper_tiles(5, "int4")
    with torch.inference_mode():
        want = few_tokens_experts(x, topk_weights_TK, topk_ids_TK, experts, tiles)
        x[2] = torch.nan
        got = few_tokens_experts(x, topk_weights_TK, topk_ids_TK, experts, tiles)
    assert isinstance(got, Tensor) and isinstance(want, Tensor)
    others = torch.tensor([0, 1, 3, 4], device=x.device)
    assert torch.equal(got[others], want[others]) and bool(got[2].isnan().all())


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("int4", QWEN), ("fp8 blocks", QWEN), ("mxfp4", GPT_OSS), ("int4 relu2", NEMOTRON), ("mxfp4 relu2", NEMOTRON)],
)
def test_published_sizes_and_replays(name: str, sizes: tuple[int, int, int, int]) -> None:
    """Keeps out: an offset that overflows 32 bits, tiles that do not cover all rows, experts that a graph reads of the captured
    pass, a first kernel that the second one does not wait for, and sums that are not the same each time.
    """
    H, F, E, K = sizes
    experts = experts_named(name, E, H, F)
    for T in (1, 2, 6, 8):
        x, (topk_weights_TK, topk_ids_TK) = rand(T, H, seed=T) / 16, choice(T, E, K)
        tiles = few_hopper_tiles(T, experts.gate_up.kind)
        with torch.inference_mode():
            few_tokens_experts(x, topk_weights_TK, topk_ids_TK, experts, tiles)
            graph = torch.cuda.CUDAGraph()
            with capturing(graph):
                got = few_tokens_experts(x, topk_weights_TK, topk_ids_TK, experts, tiles)
            for seed in range(3):
                topk_ids_TK.copy_(torch.rand(T, E, generator=torch.Generator().manual_seed(seed)).topk(K).indices)
                x.copy_(rand(T, H, seed=seed) / 16)
                graph.replay()
                assert isinstance(got, Tensor)
                first = got.clone()
                assert error(first, exact_mixture(x, topk_weights_TK, topk_ids_TK, experts)) < 6e-3, (T, seed)
                for _ in range(50):
                    graph.replay()
                    assert torch.equal(got, first), (T, seed)
