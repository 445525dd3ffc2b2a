"""Joined trees against every path by brute force, and the kernel against the definition."""

import math
import random
from typing import Any

import pytest
import torch
from toolkit.kernels import DEVICE
from torch import Tensor

from specdec.batch.tree import DraftTree
from specdec.draft.join.join import (
    OFF,
    agreed_steps,
    candidates_of,
    joined_chain,
    joined_tree,
    nodes_of_paths,
    raised_scores,
    with_scores,
)

BITS = torch.tensor([2, 4, 2, 1])  # of paths, the last one the drafter's
Steps = dict[tuple[int, ...], float]  # of each node, by the tokens of its path: the logarithm of its step


def random_tree(rng: random.Random, nodes: int, alphabet: int) -> tuple[list[int], list[int], list[float]]:
    """Tokens, parents and scores of a tree at most 5 deep whose siblings differ."""
    tokens, parents, scores, depths, taken = [rng.randrange(alphabet)], [0], [0.0], [0], set()
    while len(tokens) < nodes:
        parent, token = rng.randrange(len(tokens)), rng.randrange(alphabet)
        if (parent, token) in taken or depths[parent] == 5:
            continue
        taken.add((parent, token))
        tokens.append(token)
        parents.append(parent)
        scores.append(scores[parent] - rng.choice([0.0, 0.5, rng.random()]))
        depths.append(depths[parent] + 1)
    return tokens, parents, scores


def random_path(rng: random.Random, tokens: list[int], parents: list[int], depth: int, alphabet: int) -> list[int]:
    """A path that follows the tree for a while, and then goes its own way."""
    path, at = list[int](), 0
    while len(path) < depth:
        children = [n for n in range(1, len(tokens)) if parents[n] == at and at >= 0]
        if children and rng.random() < 0.8:
            at = rng.choice(children)
            path.append(tokens[at])
        else:
            at = -1
            path.append(rng.randrange(alphabet))
    return path


def case(seed: int) -> tuple[DraftTree, Tensor, Tensor, int]:
    """One sequence's tree, paths and steps, with a last path that is empty; and how many nodes are wanted."""
    rng = random.Random(seed)
    alphabet, N, P, D = rng.choice([3, 9]), rng.randrange(2, 14), rng.randrange(1, 4), rng.randrange(1, 13)
    tokens, parents, scores = random_tree(rng, N, 3 * alphabet)
    paths = [random_path(rng, tokens, parents, D, alphabet) for _ in range(P)]
    for path in paths[1:]:  # the first one is as deep as paths may be
        end = rng.choice([D, rng.randrange(D + 1)])
        path[end:] = [-1] * (D - end)
    if P > 1 and rng.random() < 0.5:  # one that begins as another does
        same = rng.randrange(D + 1)
        paths[-1] = paths[0][:same] + paths[-1][same:]
    steps = [[-rng.choice([0.0, rng.random()]) for _ in range(D)] for _ in range(P)]
    tree = DraftTree(torch.tensor([tokens]), torch.tensor([parents]), 5, scores_BN=torch.tensor([scores]))
    paths.append([-1] * D)
    steps.append([0.0] * D)
    return tree, torch.tensor([paths]), torch.tensor([steps]), rng.randrange(2, max(N, D + 1) + 1)


def scores_by_path(tree: DraftTree, paths: list[list[int]], steps: list[list[float]]) -> dict[tuple[int, ...], float]:
    """What every node of both is worth, by its tokens after the root."""
    assert tree.scores_BN is not None
    tokens, parents, scores = (x[0].tolist() for x in (tree.tokens_BN, tree.parents_BN, tree.scores_BN))
    names, found = [()], Steps()
    for n in range(1, tree.num_nodes):
        names.append((*names[parents[n]], tokens[n]))
        found[names[n]] = scores[n] - scores[parents[n]]
    paths = [[token for token in path if token >= 0] for path in paths]  # no token comes after a path's end
    for path, its_steps in zip(paths, steps, strict=True):
        for d, step in enumerate(its_steps[: len(path)]):
            if (name := tuple(path[: d + 1])) in names:
                found[name] = max(found[name], step)
    for path, its_steps in zip(paths, steps, strict=True):
        for d, step in enumerate(its_steps[: len(path)]):
            if (name := tuple(path[: d + 1])) not in names:  # its own paths' largest
                found[name] = max(found.get(name, -math.inf), step)
    return {name: sum(found[name[: i + 1]] for i in range(len(name))) for name in found}


def sources_by_path(tree: DraftTree, paths: list[list[int]], bits: list[int], name: tuple[int, ...]) -> int:
    """The sources of a node by its tokens after the root, which has none."""
    names, found = [()], 0
    for token, parent in zip(tree.tokens_BN[0, 1:].tolist(), tree.parents_BN[0, 1:].tolist(), strict=True):
        names.append((*names[parent], token))
    if not name:
        return 0
    for own, path in zip(bits, paths, strict=False):
        found |= own * (tuple(path[: len(name)]) == name)
    return found | (name in names)


@pytest.mark.parametrize("seed", range(60))
def test_the_best_nodes_of_both(seed: int) -> None:
    """Keeps out: siblings of one token, a path that goes on below the wrong node, a child above its parent, a step that is
    counted twice, a node that is better than one that was kept, nodes after a path's end."""
    tree, paths_BPD, steps_BPD, wanted = case(seed)
    worth = scores_by_path(tree, paths_BPD[0, :-1].tolist(), steps_BPD[0, :-1].tolist())
    bits = torch.cat((BITS[: paths_BPD.shape[1] - 1], BITS[-1:]))
    joined = joined_tree(tree, paths_BPD, steps_BPD, bits, wanted)
    names = [()]
    for n in range(1, wanted):
        assert int(joined.parents_BN[0, n]) < n
        names.append((*names[int(joined.parents_BN[0, n])], int(joined.tokens_BN[0, n])))
    assert len(set(names)) == wanted and joined.max_depth >= max(map(len, names))
    assert joined.tokens_BN[0, 0] == tree.tokens_BN[0, 0] and joined.scores_BN is not None
    assert joined.scores_BN[0].tolist() == pytest.approx([0.0, *(worth[name] for name in names[1:])], abs=1e-5)
    assert joined.sources_BN is not None
    for name, sources in zip(names, joined.sources_BN[0].tolist(), strict=True):
        assert sources == sources_by_path(tree, paths_BPD[0, :-1].tolist(), bits.tolist(), name)
    best = sorted(worth.values(), reverse=True)[: wanted - 1]
    assert sorted((worth[name] for name in names[1:]), reverse=True) == pytest.approx(best, abs=1e-5)


def test_a_path_of_its_own_takes_what_the_drafter_doubts() -> None:
    """Keeps out: sources that take turns.  The drafter is sure of 1 and doubts 2; a match of nine tokens goes on with 3."""
    tree = DraftTree(torch.tensor([[0, 1, 2]]), torch.tensor([[0, 0, 1]]), 2, scores_BN=torch.tensor([[0.0, -0.1, -5.0]]))
    paths = torch.tensor([[[1, 3, 4], [-1] * 3]])
    joined = joined_tree(tree, paths, torch.tensor([[[-0.5, -0.2, -0.3], [0.0] * 3]]), BITS[[0, -1]], 4)
    assert joined.tokens_BN.tolist() == [[0, 1, 3, 4]] and joined.parents_BN.tolist() == [[0, 0, 1, 2]]
    assert joined.scores_BN is not None and joined.scores_BN[0].tolist() == pytest.approx([0, -0.1, -0.3, -0.6])


def test_a_path_that_is_sure_is_not_held_down_by_one_that_begins_alike() -> None:
    """Keeps out: a prediction that equals the text and is left out, because a short match in the text proposes its first token
    as well, and comes first."""
    chain = DraftTree.chain(torch.tensor([[0, 8, 9]]))
    paths = torch.tensor([[[1, 1, 1], [1, 2, 3], [8, 9, -1]]])
    steps = torch.tensor([[[-2.7, -1.4, -0.4], [-0.1, -0.01, -0.01], [-0.5, -0.4, 0.0]]])
    joined = joined_tree(chain, paths, steps, BITS[[0, 1, -1]], 4)
    assert joined.tokens_BN.tolist() == [[0, 1, 2, 3]] and joined.scores_BN is not None
    assert joined.scores_BN[0].tolist() == pytest.approx([0, -0.1, -0.11, -0.12])
    check_kernel(chain, paths, steps)


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf, torch.inf])
def test_scores_that_are_no_numbers(bad: float) -> None:
    """Keeps out: places without a node among the best, where a row that does not speculate has logits of no number."""
    tree = DraftTree(torch.tensor([[0, 1, 2, 3]]), torch.tensor([[0, 0, 1, 2]]), 3, scores_BN=torch.tensor([[0.0] + [bad] * 3]))
    paths = torch.tensor([[[1, 2, 3], [1, 2, 9], [-1] * 3]])
    for wanted in (2, 3, 4):
        joined = joined_tree(tree, paths, torch.tensor([[[-1.0] * 3] * 2 + [[0.0] * 3]]), BITS[[0, 1, -1]], wanted)
        assert joined.tokens_BN[0].tolist() == [0, 1, 2, 3][:wanted]
        assert joined.parents_BN[0].tolist() == [0, 0, 1, 2][:wanted]
        check_kernel(tree, paths, torch.tensor([[[-1.0] * 3] * 2 + [[0.0] * 3]]))


def check_kernel(tree: DraftTree, paths_BPD: Tensor, steps_BPD: Tensor) -> None:
    """The kernel's candidates equal the definition's; places without a node hold whatever they do."""
    from specdec.draft.join.join_triton import launch_candidates

    scored = with_scores(tree, steps_BPD[:, -1])
    tokens = paths_BPD[:, :-1, : steps_BPD.shape[2]]
    steps = agreed_steps(tokens, steps_BPD[:, :-1])
    nodes = nodes_of_paths(scored, tokens)
    bits = torch.cat((BITS[: tokens.shape[1]], BITS[-1:]))
    want = candidates_of(scored, raised_scores(scored, nodes, steps), nodes, tokens, steps, bits)
    there: Any = lambda x: x if x is None else x.to(DEVICE)  # noqa: E731
    on_device = DraftTree(there(tree.tokens_BN), there(tree.parents_BN), tree.max_depth, tree.is_chain, there(tree.scores_BN))
    got = launch_candidates(on_device, there(paths_BPD.contiguous()), there(steps_BPD.contiguous()), there(bits))
    torch.testing.assert_close(got.scores_BC.cpu(), want.scores_BC, atol=1e-5, rtol=1e-5)
    holds = want.scores_BC > -torch.inf
    for ours, theirs in ((got.tokens_BC, want.tokens_BC), (got.parents_BC, want.parents_BC)):
        assert torch.equal(ours.cpu()[holds], theirs[holds])


@pytest.mark.parametrize("seed", range(12))
def test_the_kernel_finds_the_same_candidates(seed: int) -> None:
    check_kernel(*case(seed)[:3])


@pytest.mark.gpu
def test_the_kernel_on_a_gpu() -> None:
    for seed in range(200):
        check_kernel(*case(seed)[:3])


@pytest.mark.parametrize("levels", [1, 4])
def test_a_chain_without_scores(levels: int) -> None:
    """Keeps out: a chain's steps that are taken from another path, or shifted by one."""
    chain = DraftTree.chain(torch.arange(levels + 1).repeat(2, 1))
    paths = torch.tensor([[[1, 2, 7, 7, 7], [9] * 5, [1, 2, 3, 4, -1]]] * 2)
    steps = -torch.rand(2, 3, 5)
    joined = joined_tree(chain, paths, steps, BITS[[0, 1, -1]], 6)
    for b in range(2):
        chain_scores = steps[b, 2, :levels].cumsum(0).tolist()
        tree = with_scores(chain, steps[:, 2])
        assert tree.scores_BN is not None and tree.scores_BN[b].tolist() == pytest.approx([0.0, *chain_scores])
    assert not joined.is_chain
    check_kernel(chain, paths, steps)


@pytest.mark.parametrize("seed", range(6))
def test_a_chain_is_the_path_that_is_followed_furthest(seed: int) -> None:
    """Keeps out: a path that is chosen by its length or its first token, a chain with a hole where the path ends, sources of a
    token that another path has in another place; a kernel that reads beyond the chain."""
    from specdec.draft.join.join_triton import launch_joined_chain

    rng, B, D = random.Random(seed), 12, 5
    tokens = [[[rng.randrange(3) for _ in range(D)] for _ in range(4)] for _ in range(B)]
    for row in tokens:
        for path in row[:-1]:
            end = rng.randrange(D + 1)
            path[end:] = [-1] * (D - end)
    steps = [[[rng.choice([OFF, -rng.random()]) if rng.random() < 0.2 else -rng.random() for _ in range(D)] for _ in range(4)]
             for _ in range(B)]  # fmt: skip
    tokens_BPD, steps_BPD = torch.tensor(tokens), torch.tensor(steps)
    own = DraftTree.chain(torch.cat((torch.full((B, 1), 7), tokens_BPD[:, -1]), dim=1))
    made = joined_chain(own, tokens_BPD, steps_BPD, BITS)
    assert made.is_chain and made.sources_BN is not None
    room = torch.cat((tokens_BPD, torch.full((B, 4, 2), 5)), dim=2), torch.cat((steps_BPD, -torch.ones(B, 4, 1)), dim=2)
    ours = launch_joined_chain(*(each.contiguous().to(DEVICE) for each in (own.tokens_BN, *room, BITS)))
    assert torch.equal(ours[0].cpu(), made.tokens_BN) and torch.equal(ours[1].cpu(), made.sources_BN)
    for b in range(B):
        sums = [[sum(steps[b][p][: d + 1]) for d in range(D) if tokens[b][p][d] >= 0] for p in range(4)]
        best = max(range(4), key=[round(sum(map(math.exp, each)), 5) for each in sums].__getitem__)
        want = [token if token >= 0 else fill for token, fill in zip(tokens[b][best], tokens[b][-1], strict=True)]
        assert made.tokens_BN[b].tolist() == [7, *want]
        for d in range(D):
            bits = 0 if tokens[b][best][d] >= 0 else 1
            for p in range(4):
                bits |= int(BITS[p]) if tokens[b][p][: d + 1] == want[: d + 1] else 0
            assert int(made.sources_BN[b, d + 1]) == bits
    assert made.sources_BN[:, 0].tolist() == [0] * B
