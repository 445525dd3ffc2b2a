"""The draft's kernels against their definitions: growth, forks, selection.  Under Triton's interpreter without a GPU.

Shapes: B sequences, K topk, S levels, C candidates, N nodes, R = B * K branches, P parents of a sequence, W steps.
"""

from dataclasses import fields
from typing import Any

import pytest
import torch
from toolkit.kernels import DEVICE
from torch import Tensor

from specdec.attention.pages import PageTable
from specdec.draft.tree.branches import Branches, fork
from specdec.draft.tree.branches_triton import launch_fork
from specdec.draft.tree.build_tree import best_nodes
from specdec.draft.tree.build_tree_triton import launch_best_nodes
from specdec.draft.tree.expand import Beam, Candidates, expand, first_level
from specdec.draft.tree.expand_triton import launch_expand, launch_first_level
from specdec.ops.topk import stable_topk
from specdec.parallel.group import ALONE
from specdec.parallel.vocabulary import Vocabulary

pytestmark = pytest.mark.usefixtures("poisoned_new_memory")


def to_device(x: Any) -> Any:
    return type(x)(*(getattr(x, field.name).to(DEVICE) for field in fields(x)))


def level_1(B: int, K: int, S: int) -> tuple[Candidates, Beam]:
    logp_BK = -torch.rand(B, K).sort(dim=1).values
    candidates = Candidates.empty(B, K, S, torch.device("cpu"))
    return candidates, first_level(candidates, torch.randint(500, (B, K)), logp_BK)


def logits_of(kind: str, B: int, K: int, V: int, dtype: torch.dtype) -> Tensor:
    """coarse: ties within a row.  equal: every branch proposes the same, so that ties are everywhere."""
    if kind == "equal":
        return torch.randn(B, 1, V).round().expand(B, K, V).reshape(B * K, V).to(dtype)
    return (torch.randn(B * K, V).round() if kind == "coarse" else torch.randn(B * K, V)).to(dtype)


def check_growth(B: int, K: int, S: int, V: int, kind: str, dtype: torch.dtype) -> None:
    """Ids, parents and beams exactly; scores but for the rounding of log-softmax.  The beam is the best of the kernel's own
    scores, and goes into both."""
    candidates, beam = level_1(B, K, S)
    if kind == "equal":
        beam = Beam(beam.tokens_BK, torch.full((B, K), -0.5), beam.indices_BK, beam.parents_BK)
    offsets_V = torch.arange(V) % 7
    got, on_device = Candidates.empty(B, K, S, DEVICE), to_device(beam)
    launch_first_level(got, on_device.tokens_BK, on_device.scores_BK)
    for level in range(2, S + 1):
        logits = logits_of(kind, B, K, V, dtype)
        expand(candidates, level, beam, logits, offsets_V, Vocabulary.of(V, ALONE))
        on_device = launch_expand(got, level, on_device, logits.to(DEVICE), offsets_V.to(DEVICE))
        end = K + K * K * (level - 1)
        start = end - K * K
        tokens_BC, scores_BC, parents_BC = (getattr(got, field.name)[:, :end].cpu() for field in fields(got))
        assert torch.equal(tokens_BC[:, K:], candidates.tokens_BC[:, K:end])
        assert torch.equal(parents_BC, candidates.parents_BC[:, :end])
        torch.testing.assert_close(scores_BC[:, K:], candidates.scores_BC[:, K:end], atol=1e-5, rtol=1e-5)
        candidates.scores_BC[:, :end] = scores_BC
        scores_BK, top_BK = stable_topk(scores_BC[:, start:], K)
        tokens_BK = tokens_BC[:, start:].gather(1, top_BK)
        beam = Beam(tokens_BK, scores_BK, start + top_BK, top_BK // K)
        for field in fields(beam):
            assert torch.equal(getattr(on_device, field.name).cpu(), getattr(beam, field.name)), field.name


@pytest.mark.slow_cases
@pytest.mark.parametrize("kind", ["plain", "coarse", "equal"])
@pytest.mark.parametrize(("B", "K", "S", "V"), [(2, 4, 4, 90), (3, 3, 3, 17), (1, 10, 2, 300)])
def test_growth_equals_the_definition(B: int, K: int, S: int, V: int, kind: str) -> None:
    """Keeps out: children of one branch under another's score, a beam whose ties go to the wrong branch, levels that
    overwrite each other."""
    check_growth(B, K, S, V, kind, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["plain", "coarse", "equal"])
@pytest.mark.parametrize(("B", "K", "S"), [(1, 8, 5), (32, 8, 3), (1, 10, 7), (64, 10, 3), (2, 2, 3), (1, 32, 3)])
def test_growth_on_real_sizes(B: int, K: int, S: int, kind: str) -> None:
    check_growth(B, K, S, 32000, kind, torch.bfloat16)
    check_growth(B, K, 2, 128256, kind, torch.float16)


def test_a_row_of_nan_leaves_the_others_alone() -> None:
    """Keeps out: ids, parents or indices outside of every table, computed from a padded row's junk."""
    B, K, V = 3, 4, 60
    candidates, beam = Candidates.empty(B, K, 2, DEVICE), to_device(level_1(B, K, 2)[1])
    beam.scores_BK[1] = torch.nan
    logits = torch.randn(B * K, V)
    logits[K : 2 * K] = torch.nan
    launch_first_level(candidates, beam.tokens_BK, beam.scores_BK)
    grown = launch_expand(candidates, 2, beam, logits.to(DEVICE), None)
    tokens_BN, parents_BN, *_ = launch_best_nodes(candidates, torch.tensor([5, 6, 7], device=DEVICE), 9)
    assert int(grown.parents_BK.max()) < K and int(grown.indices_BK.max()) < K + K * K and int(grown.tokens_BK.max()) < V
    assert bool((parents_BN[:, 1:] < torch.arange(1, 9, device=DEVICE)).all()) and int(parents_BN.min()) == 0
    assert 0 <= int(tokens_BN.min()) and int(tokens_BN.max()) < 500
    want = best_nodes(
        Candidates(*(getattr(candidates, f.name).cpu()[::2] for f in fields(candidates))), torch.tensor([5, 7]), 9, 2
    )
    assert torch.equal(tokens_BN[::2].cpu(), want.tokens_BN) and torch.equal(parents_BN[::2].cpu(), want.parents_BN)


@pytest.mark.parametrize("first", [0, 9])
def test_scores_that_are_no_numbers_never_separate_a_child_from_its_parent(first: int) -> None:
    """Keeps out: NaN above all scores, so that a child is chosen without its parent, hangs below another node, and has siblings
    of its own token."""
    K, S = 3, 3
    candidates = random_candidates(2, K, S, coarse=False)
    parents_C = candidates.parents_BC[0].tolist()
    for c in range(first, len(parents_C)):  # a candidate, whose parent is finite, and all below it, as sums with NaN are
        if c == first or (parents_C[c] >= 0 and bool(candidates.scores_BC[0, parents_C[c]].isnan())):
            candidates.scores_BC[0, c] = torch.nan
    root_B = torch.tensor([1, 2])
    for N in (3, 4, 8):
        tree = best_nodes(candidates, root_B, N, S)
        chosen = [(tuple(p), t) for p, t in zip(tree.parents_BN[:, 1:].tolist(), tree.tokens_BN[:, 1:].tolist(), strict=True)]
        tokens_BN, parents_BN, *_ = launch_best_nodes(to_device(candidates), root_B.to(DEVICE), N)
        assert [(tuple(p[1:]), t[1:]) for p, t in zip(parents_BN.tolist(), tokens_BN.tolist(), strict=True)] == chosen
        paths = {0: ((),)}
        for node, (above, token) in enumerate(
            zip(*(x[0, 1:].tolist() for x in (tree.parents_BN, tree.tokens_BN)), strict=True), 1
        ):
            paths[node] = (*paths[above], (above, token))
        assert len(set(paths.values())) == N, "siblings hold one token"


def random_candidates(B: int, K: int, S: int, coarse: bool) -> Candidates:
    """Grown by the definition; coarse: log-probabilities 0, -1 or -2, so that parents tie with children and all."""
    candidates, beam = level_1(B, K, S)
    if coarse:
        candidates.scores_BC[:, :K] = beam.scores_BK.round()
        beam = Beam(beam.tokens_BK, beam.scores_BK.round(), beam.indices_BK, beam.parents_BK)
    for level in range(2, S + 1):
        logits = torch.randn(B * K, 2 * K) * 8
        beam = expand(candidates, level, beam, logits, None, Vocabulary.of(2 * K, ALONE))
        if coarse:
            end = K + K * K * (level - 1)
            start = end - K * K
            steps = -torch.randint(3, (B, K, K)).float().sort(dim=-1).values
            parents_BC = candidates.parents_BC[:, start:end]
            candidates.scores_BC[:, start:end] = candidates.scores_BC.gather(1, parents_BC) + steps.flatten(1)
            scores, top = stable_topk(candidates.scores_BC[:, start:end], K)
            beam = Beam(candidates.tokens_BC[:, start:end].gather(1, top), scores, start + top, top // K)
    return candidates


def check_selection(B: int, K: int, S: int, N: int, coarse: bool) -> None:
    candidates, root_B = random_candidates(B, K, S, coarse), torch.randint(900, (B,))
    apart = torch.stack((root_B, root_B + 1), dim=1)[:, 0]
    candidates.tokens_BC.bitwise_or_(torch.randint(8, candidates.tokens_BC.shape) << 32)
    want = best_nodes(candidates, root_B, N, S, 32)
    tokens_BN, parents_BN, scores_BN, sources_BN = launch_best_nodes(to_device(candidates), apart.to(DEVICE), N, 32)
    assert want.sources_BN is not None and sources_BN is not None and torch.equal(sources_BN.cpu(), want.sources_BN)
    assert int(want.tokens_BN.max()) < 2**32 and not want.sources_BN[:, 0].any()
    assert torch.equal(tokens_BN.cpu(), want.tokens_BN) and torch.equal(parents_BN.cpu(), want.parents_BN)
    assert want.scores_BN is not None and torch.equal(scores_BN.cpu(), want.scores_BN)


@pytest.mark.slow_cases
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize(
    ("B", "K", "S", "N"), [(3, 4, 4, 16), (2, 4, 4, 53), (2, 4, 4, 2), (1, 10, 7, 60), (4, 8, 1, 9), (2, 2, 6, 12)]
)
def test_the_best_nodes_equal_the_definition(B: int, K: int, S: int, N: int, coarse: bool) -> None:
    """Keeps out: one node too many or too few among equal scores, a parent left out, parents numbered as candidates."""
    check_selection(B, K, S, N, coarse)


@pytest.mark.gpu
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize(
    ("B", "K", "S", "N"), [(1, 8, 5, 32), (32, 10, 7, 60), (64, 8, 5, 32), (2, 32, 8, 1024), (3, 4, 64, 900), (1, 64, 2, 700)]
)
def test_the_best_nodes_of_large_trees(B: int, K: int, S: int, N: int, coarse: bool) -> None:
    check_selection(B, K, S, N, coarse)


def fork_inputs(B: int, K: int, W: int, H: int, page_size: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Lengths at a page's edges and 0; an inactive row on the dummy page."""
    P = 1 if W == 0 else K
    lens_B = torch.tensor([[0, page_size - 1, page_size, 37][b % 4] for b in range(B)], dtype=torch.int32)
    width = (37 + K * (W + 1)) // page_size + 2
    page_table_BW = (torch.randperm(B * width) + 1).view(B, width).int()
    page_table_BW[0] = 0
    ancestors = torch.randint(1000, (B * P, W), dtype=torch.int32)
    return PageTable(page_table_BW, page_size), lens_B, torch.randint(P, (B, K)), torch.randn(B * P, H).to(dtype), ancestors


@pytest.mark.slow_cases
@pytest.mark.parametrize(("B", "K", "W", "H"), [(3, 4, 0, 40), (4, 4, 1, 1030), (2, 3, 9, 64), (1, 2, 3, 8)])
@pytest.mark.parametrize("page_size", [1, 16])
def test_forks_equal_the_definition(B: int, K: int, W: int, H: int, page_size: int) -> None:
    """Keeps out: a branch that inherits its own number's path instead of its parent's, slots off by a step or a page."""
    check_fork(fork_inputs(B, K, W, H, page_size, torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize(("B", "K", "W"), [(1, 8, 0), (32, 8, 3), (64, 10, 5), (1, 64, 62)])
def test_forks_on_real_sizes(B: int, K: int, W: int) -> None:
    check_fork(fork_inputs(B, K, W, 4096, 16, torch.bfloat16))


def check_fork(inputs: tuple[Any, ...]) -> None:
    want = fork(*inputs)
    got = Branches(*launch_fork(*(x.to(DEVICE) for x in inputs)))
    for name in ("hidden_RH", "positions_R", "slots_R"):
        assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), name
        assert getattr(got, name).dtype == getattr(want, name).dtype
    assert torch.equal(got.suffix.pages.table.cpu(), want.suffix.pages.table)
    for name in ("cache_seqlens", "cu_seqlens_q"):
        assert torch.equal(getattr(got.suffix, name).cpu(), getattr(want.suffix, name)), name
