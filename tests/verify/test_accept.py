"""The acceptance rule against a walk from node to node, on random trees and random target tokens.

Keeps out: a path that goes on after a rejected node, two children accepted at once, padding that looks like accepted tokens.
"""

import random

import pytest
import torch
from toolkit.trees import chain_shape, children_of, random_trees
from torch import Tensor

from specdec.batch.tree import DraftTree
from specdec.verify.accept import Accepted, accept_path


def walk(parents: list[int], tokens: list[int], target: list[int]) -> tuple[list[int], list[int]]:
    """(path from the root, emitted tokens), found node by node."""
    path = [0]
    while True:
        node = path[-1]
        children = [n for n in range(1, len(parents)) if parents[n] == node and tokens[n] == target[node]]
        assert len(children) <= 1
        if not children:
            return path, [tokens[n] for n in path[1:]] + [target[node]]
        path += children


def ones(rows: int) -> Tensor:
    """All rows speculate."""
    return torch.ones(rows, dtype=torch.int32)


def likely_target(parents: list[int], tokens: list[int], vocab: int, rng: random.Random) -> list[int]:
    """A target token for each node: mostly one of its children's."""
    children = [[tokens[m] for m in nodes] for nodes in children_of(parents).values()]
    return [rng.choice(c) if c and rng.random() < 0.8 else rng.randrange(vocab) for c in children]


def tensors(accepted: Accepted) -> list[Tensor]:
    return [*accepted[:-1], accepted.emitted.numbers_BX]


@pytest.mark.parametrize(("nd", "steps"), [(2, 1), (6, 5), (16, 5), (16, 2), (33, 6), (60, 8)])
def test_equals_a_walk(nd: int, steps: int) -> None:
    """The vocabulary is small, so the same token occurs in many branches."""
    rng = random.Random(nd)
    vocab = nd if steps == 1 else max(20, nd)
    tree = random_trees(40, nd, steps, vocab, rng)
    rows = list(zip(tree.parents_BN.tolist(), tree.tokens_BN.tolist(), strict=True))
    targets = [likely_target(parents, tokens, vocab, rng) for parents, tokens in rows]
    got = accept_path(tree, torch.tensor(targets), ones(40))
    lengths = set()
    for row, ((parents, tokens), target) in enumerate(zip(rows, targets, strict=True)):
        path, emitted = walk(parents, tokens, target)
        a = int(got.accepted_B[row])
        assert a == len(path) - 1 <= steps
        assert got.path_BE[row, : a + 1].tolist() == path == sorted(path)
        assert got.tokens_BE[row, : a + 1].tolist() == emitted
        assert got.path_BE[row, a + 1 :].tolist() == list(range(a + 1, tree.max_depth + 1))  # moved onto themselves
        lengths.add(a)
    assert len(lengths) > min(steps, 3)


@pytest.mark.parametrize(("nd", "steps"), [(2, 1), (6, 5), (16, 3), (33, 6)])
def test_the_path_of_first_choices_equals_a_walk(nd: int, steps: int) -> None:
    """Keeps out: a chain's acceptance told wrongly by trees, which no text shows."""
    rng = random.Random(nd)
    vocab = max(20, nd)
    tree = random_trees(40, nd, steps, vocab, rng)
    rows = list(zip(tree.parents_BN.tolist(), tree.tokens_BN.tolist(), strict=True))
    targets = [likely_target(parents, tokens, vocab, rng) for parents, tokens in rows]
    got = accept_path(tree, torch.tensor(targets), ones(40)).emitted.best_B2.tolist()
    for (parents, tokens), target, (best, length) in zip(rows, targets, got, strict=True):
        node, is_on, want = 0, True, [0, 0]
        while children := [child for child in range(node + 1, nd) if parents[child] == node]:
            is_on = is_on and tokens[children[0]] == target[node]
            node, want = children[0], [want[0] + is_on, want[1] + 1]
        assert [best, length] == want
    assert len({best for best, _ in got}) > 1


def test_chain_and_its_tree_are_one() -> None:
    """Keeps out: a rule for chains that differs from the rule for trees."""
    rng = random.Random(1)
    for nd in (2, 5, 8):
        tokens = torch.randint(3, (64, nd), generator=torch.Generator().manual_seed(nd))
        target = torch.randint(3, (64, nd), generator=torch.Generator().manual_seed(nd + 1))
        parents = torch.tensor([chain_shape(nd)[0]] * 64)
        chain = accept_path(DraftTree.chain(tokens), target, ones(64))
        tree = accept_path(DraftTree(tokens, parents, nd - 1), target, ones(64))
        for a, b in zip(tensors(chain), tensors(tree), strict=True):
            assert torch.equal(a, b)
        row = rng.randrange(64)
        assert int(chain.accepted_B[row]) == len(walk(parents[row].tolist(), tokens[row].tolist(), target[row].tolist())[0]) - 1


def test_the_root_alone_is_plain_decoding() -> None:
    """Keeps out: a baseline that needs a draft's columns."""
    got = accept_path(DraftTree.chain(torch.tensor([[7], [9]])), torch.tensor([[3], [4]]), ones(2))
    assert got.accepted_B.tolist() == [0, 0] and got.tokens_BE.tolist() == [[3], [4]]


def test_a_row_that_does_not_speculate_takes_its_root_alone() -> None:
    """Keeps out: a draft token accepted for a request that asked for none, and a neighbour that loses its own."""
    rng = random.Random(4)
    tree = random_trees(40, 16, 5, 20, rng)
    rows = list(zip(tree.parents_BN.tolist(), tree.tokens_BN.tolist(), strict=True))
    targets = torch.tensor([likely_target(parents, tokens, 20, rng) for parents, tokens in rows])
    speculates_B = torch.tensor([rng.randrange(2) for _ in range(40)], dtype=torch.int32)
    all_do, mixed = accept_path(tree, targets, ones(40)), accept_path(tree, targets, speculates_B)
    assert all_do.accepted_B[speculates_B == 0].any()
    for row in range(40):
        if speculates_B[row]:
            assert all(torch.equal(a[row], b[row]) for a, b in zip(tensors(all_do), tensors(mixed), strict=True))
        else:
            assert int(mixed.accepted_B[row]) == 0 and mixed.path_BE[row].tolist() == list(range(tree.max_depth + 1))
            assert mixed.emitted.numbers_BX[row, :2].tolist() == [0, int(targets[row, 0])]
