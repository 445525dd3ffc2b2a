"""Mixtures of few tokens in two launches, against float64.  On a GPU in bfloat16, else in float16 under Triton's interpreter.

Shapes: T tokens, H hidden size, E experts, K experts of a token (top_k), F intermediate size of an expert.
"""

from __future__ import annotations

import pytest
import torch
from toolkit.inside.captures import capturing
from toolkit.kernels import HAS_GPU, MARK, fence_new_memory
from toolkit.quantised_weights import DTYPE, FORMS, choice, error, exact_activation, exact_mixture, experts_of, rand
from torch import Tensor

from specdec.ops.products.experts import (
    Activation,
    DenseExperts,
    Experts,
    Form,
    GeGLU,
    Relu2,
    SharedExperts,
    SharedOutput,
    SwiGLU,
    few_tokens_experts,
    inputs_of,
)
from specdec.ops.products.kernels.experts import few_tokens_triton
from specdec.ops.products.numerics import FAST, INVARIANT
from specdec.ops.products.partials import Partials
from specdec.ops.products.tiles.experts import ExpertsKind, ExpertTiles, MixtureTiles, few_tokens_tiles

NEAR = 6e-3 if HAS_GPU else 1e-3
CASES = [
    ("fp8 rows", 1, 2, 1), ("fp8 blocks", 5, 1, 1), ("int8 zero points", 5, 2, 1), ("int4", 1, 1, 1),
    ("int4 zero points", 5, 2, 1), ("mxfp4", 5, 2, 1), ("mxfp4", 1, 2, 1), ("dense", 5, 1, 1), ("dense", 5, 2, 1),
    ("dense", 1, 4, 1), ("dense", 64, 2, 1), ("dense", 1, 2, 2), ("mxfp4", 1, 1, 2),
    ("fp8 rows", 5, 2, 2), ("int4 zero points", 1, 1, 2), ("mxfp4", 5, 2, 4), ("dense relu2", 1, 2, 1),
    ("dense relu2", 5, 2, 1), ("fp8 rows relu2", 1, 2, 1), ("fp8 blocks relu2", 5, 1, 1), ("int4 relu2", 5, 2, 1),
    ("mxfp4 relu2", 5, 2, 1), ("mxfp4 relu2", 1, 1, 2), ("dense geglu", 5, 2, 1), ("int4 geglu", 1, 1, 1),
]  # fmt: skip


def tiles_of(T: int, kind: ExpertsKind, splits: int, slices: int = 1) -> MixtureTiles:
    """On a GPU the policy's; large ones for the interpreter, which takes long for many programs."""
    if HAS_GPU:
        own = few_tokens_tiles(T, kind)
        warps = {"warps": slices, "slices": slices} if slices > 1 else {}
        return own._replace(gate_up=own.gate_up._replace(**warps), down=own.down._replace(splits=splits, **warps))
    block_m = max(8, T)
    return MixtureTiles(
        "few_tokens_triton", ExpertTiles(block_m, 64, 4, 2, 2, 1, slices), ExpertTiles(block_m, 128, 4, 2, 1, splits, slices)
    )


def experts_named(name: str, E: int, H: int, F: int) -> Experts:
    """A form of FORMS or "dense"; with " relu2" without gates, with " geglu" with gates of that kind."""
    form = name.removesuffix(" relu2").removesuffix(" geglu")
    activation: Activation | None = SwiGLU(1.7, 7.0) if name == "mxfp4" else None
    if form != name:
        activation = Relu2() if name.endswith(" relu2") else GeGLU()
    if form != "dense":
        return experts_of(FORMS[form], E, H, F, activation)
    parts = inputs_of(activation or SwiGLU())
    return DenseExperts(rand(E, parts * F, H, seed=7) / 4, rand(E, H, F, seed=8) / 4, Form(activation or SwiGLU()))


def kind_of(experts: Experts) -> ExpertsKind:
    return "dense" if isinstance(experts, DenseExperts) else experts.gate_up.kind


@pytest.mark.slow_cases(keep=6)
@pytest.mark.parametrize(("name", "T", "splits", "slices"), CASES)
def test_a_mixture_equals_its_definition(
    name: str, T: int, splits: int, slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Keeps out: rows of another expert or token, gates taken for ups, columns beyond the last one; where one expert ends and
    the next one begins, a scale, a zero or a bias of the other one; activations that nobody wrote, of tokens that did not
    choose an expert; writes beyond the end; columns that two slices have, or none.
    """
    form = name.removesuffix(" relu2").removesuffix(" geglu")
    H, F = {"fp8 blocks": (160, 128), "int4": (128, 128)}.get(form, (160, 300 if slices > 1 and form == "mxfp4" else 40))
    experts = experts_named(name, 3, H, F)
    x, (topk_weights_TK, topk_ids_TK) = rand(T, H, seed=2) / 8, choice(T, 3, 2)
    fences = [] if HAS_GPU else fence_new_memory(few_tokens_triton, monkeypatch)
    with torch.inference_mode():
        got = few_tokens_experts(x, topk_weights_TK, topk_ids_TK, experts, tiles_of(T, kind_of(experts), splits, slices))
    assert isinstance(got, Tensor) and got.dtype == DTYPE
    assert error(got, exact_mixture(x, topk_weights_TK, topk_ids_TK, experts)) < NEAR
    assert all(bool((fence == MARK).all()) for fence in fences)


@pytest.mark.parametrize("T", [1, 5])
def test_shared_experts_and_experts_elsewhere(T: int) -> None:
    """Keeps out: a term that each split adds, a gate of another token, partials whose sum is not the product, and the row of an
    expert that other ranks have: an id that is none of this rank's adds nothing, also where it is a token's only one.
    """
    experts, x, (topk_weights_TK, topk_ids_TK) = experts_named("dense", 4, 40, 24), rand(T, 40, seed=3), choice(T, 4, 3)
    shared, gate, tiles = rand(T, 40, seed=4), torch.rand(T, 1, device=x.device), tiles_of(T, "dense", 2)
    away_TK = topk_ids_TK.where(torch.rand(T, 3, device=x.device) < 0.6, torch.tensor(4 if T > 1 else -1, device=x.device))
    here_TK = (away_TK >= 0) & (away_TK < 4)
    want = exact_mixture(x, topk_weights_TK * here_TK, topk_ids_TK, experts)
    with torch.inference_mode():
        alone = few_tokens_experts(x, topk_weights_TK, away_TK, experts, tiles)
        both = few_tokens_experts(x, topk_weights_TK, away_TK, experts, tiles, SharedOutput(shared, gate), partials=True)
        plain = few_tokens_experts(x, topk_weights_TK, away_TK, experts, tiles, SharedOutput(shared, None))
    assert isinstance(alone, Tensor) and isinstance(both, Partials) and isinstance(plain, Tensor)
    scale = shared.double().norm()
    assert (alone.double() - want).norm() < NEAR * max(want.norm(), 1e-3)
    assert (both.tensor().double() - want - shared.double() * gate.double()).norm() < NEAR * scale
    assert (plain.double() - want - shared.double()).norm() < NEAR * scale


@pytest.mark.slow_cases(keep=2)
@pytest.mark.parametrize(
    ("name", "T", "R", "weighed"),
    [
        ("dense", 1, 1, True),
        ("dense", 1, 2, False),
        ("dense", 5, 2, True),
        ("dense relu2", 1, 2, False),
        ("dense relu2", 5, 2, True),
    ],
)
def test_shared_experts_beside_the_chosen_ones(
    name: str, T: int, R: int, weighed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """Keeps out: rows and columns of another shared expert, a gate of another token or of the chosen ones, a part of the
    columns that two splits have, or none, and a list that is one entry too short.
    """
    H, F, A = 40, 900 if T == 1 else 300, 2  # of which each expert has two splits, if there is one token
    experts, x, (topk_weights_TK, topk_ids_TK) = experts_named(name, 4, H, F), rand(T, H, seed=3) / 2, choice(T, 4, A)
    rows = R * F * inputs_of(experts.form.activation)
    weighs = torch.rand(T, 1, device=x.device) if weighed else None
    shared = SharedExperts(rand(rows, H, seed=4) / 4, rand(H, R * F, seed=5) / 4, weighs, R)
    away_TK = topk_ids_TK.where(torch.rand(T, A, device=x.device) < 0.7, torch.tensor(4, device=x.device))
    both_TG = x.double() @ shared.gate_up_GH.double().T
    want = torch.stack([exact_activation(each, experts.form.activation) for each in both_TG]) @ shared.down_HF.double().T
    want = want if shared.gate_T1 is None else want * shared.gate_T1
    want += exact_mixture(x, topk_weights_TK * (away_TK < 4), topk_ids_TK, experts)
    fences = [] if HAS_GPU else fence_new_memory(few_tokens_triton, monkeypatch)
    with torch.inference_mode():
        got = few_tokens_experts(x, topk_weights_TK, away_TK, experts, tiles_of(T, "dense", 8), shared)
        parts = few_tokens_experts(x, topk_weights_TK, away_TK, experts, tiles_of(T, "dense", 8), shared, partials=True)
    assert isinstance(got, Tensor) and isinstance(parts, Partials)
    assert error(got, want) < NEAR and error(parts.tensor(), want) < NEAR
    assert all(bool((fence == MARK).all()) for fence in fences)


def test_a_token_does_not_depend_on_nan_beside_it() -> None:
    """Keeps out: a padded row, or another token's, that is multiplied by 0 instead of being left out."""
    experts, x, (topk_weights_TK, topk_ids_TK) = experts_named("dense", 4, 40, 24), rand(5, 40, seed=3), choice(5, 4, 2)
    tiles = tiles_of(5, "dense", 1)
    with torch.inference_mode():
        want = few_tokens_experts(x, topk_weights_TK, topk_ids_TK, experts, tiles)
        x[2] = torch.nan
        got = few_tokens_experts(x, topk_weights_TK, topk_ids_TK, experts, tiles)
    assert isinstance(got, Tensor) and isinstance(want, Tensor)
    others = torch.tensor([0, 1, 3, 4], device=x.device)
    assert torch.equal(got[others], want[others]) and bool(got[2].isnan().all())


def test_an_invariant_policy_takes_neither_kernel() -> None:
    """Keeps out: sums over experts whose order is another one where a token is alone, in texts that must not depend on that."""
    assert (
        INVARIANT.mixture_tiles(1, 8, 128, "dense", torch.bfloat16, True) is None
        and INVARIANT.router_tiles(1, 128, torch.bfloat16) is None
    )


def test_experts_without_gates_leave_the_kernels_of_few_tokens_earlier() -> None:
    """Keeps out: a batch of 32 that waits for the second product of kernels for few tokens; stored in few bits they stay."""

    def kernel(tokens: int, kind: ExpertsKind, gated: bool) -> str | None:
        tiles = FAST.mixture_tiles(tokens, 6, 128, kind, torch.bfloat16, True, False, gated)
        return tiles and tiles.kernel

    assert kernel(32, "dense", True) == kernel(16, "dense", False) == "few_tokens_triton"
    assert kernel(17, "dense", False) is None and FAST.sorted_tiles(17, 6, 128, torch.bfloat16, True) is not None
    assert kernel(32, "int4", False) == "mixture_triton"


QWEN, GPT_OSS, NEMOTRON = (2048, 768, 128, 8), (2880, 2880, 32, 4), (2688, 1856, 128, 6)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("dense", QWEN), ("fp8 blocks", QWEN), ("int4", QWEN), ("mxfp4", GPT_OSS), ("dense relu2", NEMOTRON),
        ("fp8 rows relu2", NEMOTRON), ("int4 relu2", QWEN), ("mxfp4 relu2", NEMOTRON),
    ],
)  # fmt: skip
def test_published_sizes_and_replays(name: str, sizes: tuple[int, int, int, int]) -> None:
    """Keeps out: an offset that overflows 32 bits, tiles that do not cover all rows, experts that a graph reads of the captured
    pass, arrivals that are not set back, and a first kernel that the second one does not wait for.
    """
    H, F, E, K = sizes
    experts = experts_named(name, E, H, F)
    for T in (1, 2, 6, 8, 17, 32, *((48, 64) if name.startswith("dense") else ())):
        x, (topk_weights_TK, topk_ids_TK) = rand(T, H, seed=T) / 16, choice(T, E, K)
        tiles = few_tokens_tiles(T, kind_of(experts))
        few = slice(max(0, T - 4), T)
        with torch.inference_mode():
            few_tokens_experts(x, topk_weights_TK, topk_ids_TK, experts, tiles)
            graph = torch.cuda.CUDAGraph()
            with capturing(graph):
                got = few_tokens_experts(x, topk_weights_TK, topk_ids_TK, experts, tiles)
            for seed in range(3):
                topk_ids_TK.copy_(torch.rand(T, E, generator=torch.Generator().manual_seed(seed)).topk(K).indices)
                x.copy_(rand(T, H, seed=seed) / 16)
                graph.replay()
                want = exact_mixture(x[few], topk_weights_TK[few], topk_ids_TK[few], experts)
                assert isinstance(got, Tensor) and error(got[few], want) < 6e-3, (T, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 6, 32])
def test_a_mixture_is_the_same_each_time(T: int) -> None:
    """Keeps out: a race between programs that add up splits, or between the two launches."""
    experts, x, chosen = experts_named("dense", 128, 2048, 768), rand(T, 2048) / 16, choice(T, 128, 8)
    with torch.inference_mode():
        first, *others = (few_tokens_experts(x, *chosen, experts, few_tokens_tiles(T, "dense")) for _ in range(300))
        assert isinstance(first, Tensor)
        for each in others:
            assert isinstance(each, Tensor) and torch.equal(each, first)
