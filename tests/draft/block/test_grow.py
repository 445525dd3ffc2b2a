"""Trees over independent levels: the best nodes of all paths, by brute force; and the kernel, which finds the same.

Keeps out: a beam that drops a node whose score is among the best, ties that are broken in another order, a child before its
parent.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.draft.block.rounds.grow import best_paths

SHAPES = [(1, 3, 3), (2, 2, 5), (3, 3, 30), (4, 2, 20), (3, 5, 31), (2, 1, 3), (5, 1, 6)]  # levels, tokens of each, nodes


def levels(B: int, S: int, K: int, kind: str, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logp_BSK = torch.randn(B, S, K, generator=generator).mul(2).log_softmax(-1)
    if kind == "ties":
        logp_BSK = -torch.randint(1, 3, (B, S, K), generator=generator) / 2
    if kind == "sure":  # no score falls along the likeliest path
        logp_BSK[..., 0] = 0.0
    logp_BSK = logp_BSK.sort(-1, descending=True).values
    tokens_BSK = torch.stack([torch.randperm(97, generator=generator)[:K] for _ in range(B * S)]).view(B, S, K)
    return logp_BSK, tokens_BSK


def all_nodes(logp_SK: Tensor) -> list[tuple[int, ...]]:
    """Every path of ranks, in the order of the law."""
    S, K = logp_SK.shape
    score: dict[tuple[int, ...], float] = {(): 0.0}
    placed: list[tuple[int, ...]] = [()]
    found: list[tuple[int, ...]] = []
    for level in range(S):
        children = [(*parent, rank) for parent, rank in itertools.product(placed, range(K))]
        for path in children:
            score[path] = float(torch.tensor(score[path[:-1]], dtype=torch.float32) + logp_SK[level, path[-1]])
        placed = sorted(children, key=lambda path: -score[path])  # stable: by the parent's place, then by rank
        found += placed
    return sorted(found, key=lambda path: -score[path])  # stable: shallower levels first


@pytest.mark.parametrize("kind", ["random", "ties", "sure"])
@pytest.mark.parametrize(("S", "K", "N"), SHAPES, ids=str)
def test_the_best_of_all_paths(S: int, K: int, N: int, kind: str) -> None:
    logp_BSK, tokens_BSK = levels(3, S, K, kind, seed=S * K)
    root_B = torch.tensor([5, 6, 7])
    tree = best_paths(logp_BSK, tokens_BSK, root_B, N)
    for b in range(3):
        want = all_nodes(logp_BSK[b])[: N - 1]
        numbers = {path: n for n, path in enumerate(want, 1)} | {(): 0}
        assert tree.parents_BN[b].tolist() == [0, *(numbers[path[:-1]] for path in want)]
        assert tree.tokens_BN[b].tolist() == [5 + b, *(int(tokens_BSK[b, len(p) - 1, p[-1]]) for p in want)]
        sums = [sum(float(logp_BSK[b, level, rank]) for level, rank in enumerate(path)) for path in want]
        assert tree.scores_BN is not None and tree.scores_BN[b].tolist() == pytest.approx([0.0, *sums])
    assert tree.max_depth == min(S, N - 1) and not tree.is_chain


@pytest.mark.parametrize("kind", ["random", "ties", "sure"])
@pytest.mark.parametrize(("S", "K", "N"), [(1, 3, 3), (3, 3, 20), (4, 5, 31)], ids=str)
def test_the_kernel_finds_the_same(S: int, K: int, N: int, kind: str) -> None:
    check_kernel(*levels(2, S, K, kind, seed=N), N)


def check_kernel(logp_BSK: Tensor, tokens_BSK: Tensor, N: int) -> None:
    from specdec.draft.block.rounds.grow_triton import launch_best_paths

    root_B = torch.arange(len(logp_BSK))
    want = best_paths(logp_BSK, tokens_BSK, root_B, N)
    device: Any = "cuda" if torch.cuda.is_available() else "cpu"
    got = launch_best_paths(logp_BSK.to(device), tokens_BSK.to(device), root_B.to(device), N)
    assert torch.equal(got[0].cpu(), want.tokens_BN) and torch.equal(got[1].cpu(), want.parents_BN)
    assert want.scores_BN is not None and torch.equal(got[2].cpu(), want.scores_BN)


@pytest.mark.gpu
def test_the_kernel_on_a_gpu() -> None:
    for (S, K, N), kind in itertools.product([(5, 8, 32), (7, 10, 60), (2, 16, 255), (64, 2, 200)], ["random", "ties", "sure"]):
        check_kernel(*levels(8, S, K, kind, seed=N), N)


def test_what_is_no_number_comes_last() -> None:
    """Keeps out: a tree that is none where a row's logits are NaN, as in rows that do not speculate."""
    logp_BSK, tokens_BSK = levels(2, 3, 3, "random", seed=1)
    logp_BSK[1] = torch.nan
    logp_BSK[0, 1] = -torch.inf
    tree = best_paths(logp_BSK, tokens_BSK, torch.zeros(2, dtype=torch.int64), 12)
    parents = tree.parents_BN[:, 1:]
    assert bool((parents < torch.arange(1, 12)).all()) and bool((parents >= 0).all())
    check_kernel(logp_BSK, tokens_BSK, 12)
