"""The verifier's kernels against their definitions: tree tables and acceptance.  Under Triton's interpreter without a GPU.

Shapes: B sequences, N nodes, E places on a path.
"""

import random
from dataclasses import replace

import pytest
import torch
from toolkit.kernels import DEVICE, MARK, fence_new_memory
from toolkit.trees import random_trees
from torch import Tensor

from specdec.attention.pages import PageTable
from specdec.batch.emitted import tree_numbers
from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.batch.trees import numbers_triton
from specdec.batch.trees.numbers_triton import launch_tree_numbers
from specdec.batch.trees.tables import path_tables
from specdec.batch.trees.tables_triton import launch_path_tables
from specdec.verify import accept_triton
from specdec.verify.accept import Accepted, accept
from specdec.verify.accept_triton import launch_accept

SHAPES = [(3, 2, 1), (4, 16, 5), (2, 60, 7), (2, 33, 32), (3, 7, 2)]
LARGE = [(1, 6, 5), (1, 32, 5), (64, 60, 7), (2, 1024, 64), (32, 1000, 6)]


pytestmark = pytest.mark.usefixtures("poisoned_new_memory")


def tree_of(B: int, N: int, S: int, chain: bool = False) -> DraftTree:
    return random_trees(B, N, S, N, random.Random(N), chain)


def on_device(tree: DraftTree) -> DraftTree:
    sources_BN = None if tree.sources_BN is None else tree.sources_BN.to(DEVICE)
    return DraftTree(
        tree.tokens_BN.to(DEVICE), tree.parents_BN.to(DEVICE), tree.max_depth, tree.is_chain, sources_BN=sources_BN
    )


def likely_targets(tree: DraftTree) -> Tensor:
    """At most nodes, the token of one of its children; else some token."""
    B, N = tree.tokens_BN.shape
    targets_BN = torch.randint(N, (B, N))
    for b in range(B):
        for n in torch.randperm(N - 1).add(1).tolist():
            if random.random() < 0.9:
                targets_BN[b, tree.parents_BN[b, n]] = tree.tokens_BN[b, n]
    return targets_BN


def new_state(B: int) -> BatchState:
    """Some rows inactive, some of length 0, some that do not speculate."""
    state = BatchState.empty(B, 4, page_size=1, device="cpu")
    state.lens_B.copy_(torch.randint(900, (B,)) * (torch.arange(B) % 3 != 1))
    state.bonus_B.fill_(-1)
    state.active_B.copy_(torch.arange(B) % 4 != 2)
    state.speculates_B.copy_(torch.rand(B) < 0.7)
    return state


def check_acceptance(tree: DraftTree, targets_BN: Tensor) -> None:
    state = new_state(len(targets_BN))
    copy = BatchState(*(tensor.to(DEVICE, copy=True) for tensor in state.tensors()), page_size=1)
    want, want_base_B = accept(tree, targets_BN, state)
    *got, base_B = launch_accept(on_device(tree), targets_BN.to(DEVICE), copy)
    *got, emitted = got
    ours, theirs = (*got, emitted.numbers_BX), (*want[:-1], want.emitted.numbers_BX)
    for name, a, b in zip(Accepted._fields, ours, theirs, strict=True):
        assert a.dtype == b.dtype and torch.equal(a.cpu(), b), name
    assert torch.equal(base_B.cpu(), want_base_B)
    for name in ("lens_B", "bonus_B", "active_B", "speculates_B"):
        assert torch.equal(getattr(copy, name).cpu(), getattr(state, name)), name


@pytest.mark.slow_cases
@pytest.mark.parametrize(("B", "N", "S"), [*SHAPES, *(pytest.param(*s, marks=pytest.mark.gpu) for s in LARGE)])
def test_acceptance_equals_the_definition(B: int, N: int, S: int) -> None:
    """Keeps out: a node taken below a miss, padding that looks accepted, lengths of inactive rows that grow, a bonus token
    of the wrong node."""
    tree = tree_of(B, N, S)
    for targets_BN in (likely_targets(tree), torch.randint(N, (B, N)), torch.full((B, N), N)):
        check_acceptance(tree, targets_BN)
        check_acceptance(replace(tree, sources_BN=torch.randint(1 << 40, (B, N))), targets_BN)


def test_acceptance_writes_into_its_own_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps out: padding written for all nodes instead of all places on a path, over the next row or beyond the last one."""
    fences = fence_new_memory(accept_triton, monkeypatch)
    for B in (1, 3):
        tree = tree_of(B, 60, 2)
        state = BatchState(*(tensor.to(DEVICE) for tensor in new_state(B).tensors()), page_size=1)
        launch_accept(on_device(tree), torch.full((B, 60), 60, device=DEVICE), state)
    assert len(fences) >= 8 and all(bool((fence == MARK).all()) for fence in fences)


def test_padding_whose_siblings_are_equal_takes_its_root_alone() -> None:
    """Keeps out: two taken nodes of one depth, which leave a place of the path unwritten; keys then move from any address."""
    tree = DraftTree(torch.zeros(2, 6, dtype=torch.int64), torch.tensor([[0, 0, 0, 1, 1, 2]] * 2), 3)
    state = BatchState.empty(2, 4, page_size=1, device=DEVICE)
    state.speculates_B.fill_(1)
    path_BE, accepted_B, *_ = launch_accept(on_device(tree), torch.zeros(2, 6, dtype=torch.int64, device=DEVICE), state)
    assert accepted_B.tolist() == [0, 0] and path_BE.tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.slow_cases
@pytest.mark.parametrize("N", [1, 2, 6, 17])
def test_acceptance_of_chains(N: int) -> None:
    """Keeps out: a kernel that takes a chain's shared parents for one row a sequence; a root alone that needs children."""
    tree = tree_of(5, N, N, chain=True)
    check_acceptance(tree, torch.cat((tree.tokens_BN[:, 1:], torch.full((5, 1), 3)), 1))
    check_acceptance(tree, likely_targets(tree))
    strided = DraftTree.chain(tree.tokens_BN.t().contiguous().t())
    check_acceptance(strided, likely_targets(strided))


@pytest.mark.slow_cases
@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize(("B", "N", "S"), [*SHAPES[:4], *(pytest.param(*s, marks=pytest.mark.gpu) for s in LARGE)])
def test_tables_equal_the_definition(B: int, N: int, S: int, page_size: int) -> None:
    """Keeps out: a path upside down or one node short, slots that run over a page's end, a row that reads the dummy's."""
    tree = tree_of(B, N, S)
    lens_B = torch.tensor([[0, page_size - 1, page_size, 37, 90][b % 5] for b in range(B)], dtype=torch.int32)
    width = (90 + N) // page_size + 2
    page_table_BW = (torch.randperm(B * width) + 1).view(B, width).int()
    page_table_BW[0] = 0
    positions, slots, suffix = path_tables(PageTable(page_table_BW, page_size), lens_B, tree)
    got_positions, got_slots, got = launch_path_tables(
        PageTable(page_table_BW, page_size).to(DEVICE),
        lens_B.to(DEVICE),
        tree.parents_BN.to(DEVICE),
        min(N, tree.max_depth + 1),
    )
    assert torch.equal(got_positions.cpu(), positions) and torch.equal(got_slots.cpu(), slots)
    assert torch.equal(got.cache_seqlens.cpu(), suffix.cache_seqlens) and got.pages.table.shape == suffix.pages.table.shape
    assert torch.equal(got.cu_seqlens_q.cpu(), suffix.cu_seqlens_q) and got.max_seqlen_q == 1
    read = torch.arange(suffix.pages.table.shape[1]) < suffix.cache_seqlens[:, None]
    rows = got.pages.table.cpu()
    assert torch.equal(rows.where(read, 0), suffix.pages.table.where(read, 0))
    assert torch.equal(rows, rows.where(read, slots.flatten().int()[:, None])), "past its length a row repeats its own slot"


@pytest.mark.parametrize("sources", [False, True])
@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize(("B", "N"), [(3, 9), (1, 1), (5, 70)])
def test_numbers_of_trees_equal_the_definition(
    B: int, N: int, scores: bool, sources: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keeps out: a column of another node or row, one place too few or too many, a score that lost its bits, and a chain whose
    parents are one row for all sequences."""
    torch.manual_seed(B + N)
    tree = tree_of(B, N, min(N - 1, 4)) if N > 1 and scores else DraftTree.chain(torch.randint(900, (B, N)))
    chosen_BN = torch.randint(-1, 900, (B, N))
    tree = replace(
        tree,
        scores_BN=torch.randn(B, N).where(torch.rand(B, N) < 0.9, -torch.inf) if scores else None,
        sources_BN=torch.randint(8, (B, N)) if sources else None,
    )
    want_B5N = tree_numbers(tree, chosen_BN)
    columns = (tree.tokens_BN, tree.parents_BN, tree.scores_BN, tree.sources_BN)
    tokens_BN, parents_BN, scores_BN, sources_BN = (None if each is None else each.to(DEVICE) for each in columns)
    here = DraftTree(tokens_BN, parents_BN, tree.max_depth, tree.is_chain, scores_BN, sources_BN)  # type: ignore[arg-type]
    fences = fence_new_memory(numbers_triton, monkeypatch)
    assert torch.equal(launch_tree_numbers(here, chosen_BN.to(DEVICE)).cpu(), want_B5N)
    assert len(fences) == 2 and all(bool((fence == MARK).all()) for fence in fences)
