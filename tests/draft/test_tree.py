"""The builder's trees equal those of a brute-force EAGLE-2 that knows only paths, and keep what every reader assumes.

Keeps out: beams mixed up between branches, orphans where scores tie, an order in which a child comes before its parent.

Shapes: B sequences, K topk, S levels, N nodes.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from specdec.batch.tree import DraftTree
from specdec.draft.tree.build_tree import best_nodes
from specdec.draft.tree.expand import Candidates, first_level, next_level

VOCAB = 97
Path = tuple[int, ...]
Children = Callable[[Path, int], tuple[list[int], np.ndarray]]  # path, k: tokens and float32 log-probabilities, best first


def random_children(path: Path, k: int) -> tuple[list[int], np.ndarray]:
    rng = np.random.default_rng(list(path))
    logp = np.sort(np.log(rng.dirichlet(np.full(VOCAB, 0.1)) + 1e-12).astype(np.float32))[::-1][:k]
    return rng.permutation(VOCAB)[:k].tolist(), np.minimum(logp, np.float32(0))


def coarse_children(path: Path, k: int) -> tuple[list[int], np.ndarray]:
    """Log-probabilities of 0, -1 or -2: many paths tie, parents tie with their children."""
    rng = np.random.default_rng(list(path))
    return rng.permutation(VOCAB)[:k].tolist(), -np.sort(rng.integers(0, 3, k)).astype(np.float32)


def certain_children(path: Path, k: int) -> tuple[list[int], np.ndarray]:
    """Log-probability 0 for all: every candidate ties with every other."""
    return random_children(path, k)[0], np.zeros(k, np.float32)


def equal_children(path: Path, k: int) -> tuple[list[int], np.ndarray]:
    """All levels tie within themselves."""
    return random_children(path, k)[0], np.full(k, -1.5, np.float32)


SOURCES = [random_children, coarse_children, certain_children, equal_children]


def brute_force(children: Children, root: int, k: int, steps: int, nd: int) -> list[Path]:
    """Every node's path, root first, in order: EAGLE-2 as the paper says it; of equal scores, the node proposed first wins."""
    beam: list[tuple[Path, np.float32]] = [((), np.float32(0))]
    proposed: list[tuple[Path, np.float32]] = []
    for _ in range(steps):
        level = []
        for path, score in beam:
            for token, logp in zip(*children((root, *path), k), strict=True):
                level.append(((*path, token), np.float32(score + logp)))
        proposed += level
        beam = sorted(level, key=lambda node: -node[1])[:k]  # Python's sort is stable
    best = sorted(range(len(proposed)), key=lambda i: -proposed[i][1])[: nd - 1]
    return [(), *(proposed[i][0] for i in sorted(best))]


def grow(children: Children, roots: list[int], k: int, steps: int) -> Candidates:
    """The builder's own growth, asked for the children of the branches that it keeps."""

    def ask(paths: list[list[Path]]) -> tuple[torch.Tensor, torch.Tensor]:
        answers = [[children((root, *path), k) for path in row] for root, row in zip(roots, paths, strict=True)]
        tokens = torch.tensor([[tokens for tokens, _ in row] for row in answers])
        return tokens, torch.from_numpy(np.array([[logp for _, logp in row] for row in answers]))

    tokens, logp = ask([[()] for _ in roots])
    candidates = Candidates.empty(len(roots), k, steps, torch.device("cpu"))
    beam = first_level(candidates, tokens[:, 0], logp[:, 0])
    paths = [[(token,) for token in row] for row in tokens[:, 0].tolist()]
    for level in range(2, steps + 1):
        beam = next_level(candidates, level, beam, *ask(paths))
        grown = zip(paths, beam.parents_BK.tolist(), beam.tokens_BK.tolist(), strict=True)
        paths = [[(*row[p], t) for p, t in zip(parents, tokens, strict=True)] for row, parents, tokens in grown]
    return candidates


def tree_paths(tree: DraftTree, row: int) -> list[Path]:
    paths: list[Path] = [()]
    for node in range(1, tree.num_nodes):
        paths.append((*paths[int(tree.parents_BN[row, node])], int(tree.tokens_BN[row, node])))
    return paths


def sizes(k: int, steps: int) -> list[int]:
    """Numbers of nodes to try: the fewest, the most, and some between."""
    most = k + k * k * (steps - 1) + 1
    return sorted({2, min(most, steps + 1), min(most, 16), (most + 2) // 2, most})


def assert_sound(tree: DraftTree) -> None:
    """Asserts what verify, accept and attention take for granted."""
    B, N = tree.tokens_BN.shape
    assert tree.tokens_BN.dtype == tree.parents_BN.dtype == tree.depths_BN.dtype == torch.int64
    for b in range(B):
        parents, depths, mask = (x[b].tolist() for x in (tree.parents_BN, tree.depths_BN, tree.mask_BNN))
        assert parents[0] == depths[0] == 0
        seen: set[tuple[int, int]] = set()
        for n in range(N):
            ancestors = {n}
            while n and parents[min(ancestors)] not in ancestors:
                ancestors.add(parents[min(ancestors)])
            assert {m for m in range(N) if mask[n][m]} == ancestors and len(ancestors) == depths[n] + 1
            if n:
                assert parents[n] < n and depths[n] == depths[parents[n]] + 1 <= tree.max_depth
                assert (parents[n], int(tree.tokens_BN[b, n])) not in seen
                seen.add((parents[n], int(tree.tokens_BN[b, n])))


@pytest.mark.slow_cases(keep=10)
@pytest.mark.parametrize("children", SOURCES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("k", [1, 2, 4, 8, 10])
def test_trees_equal_brute_force(k: int, children: Children) -> None:
    """Every S from 1 to 6, the smallest and the largest trees, and random, tied and certain drafts."""
    for steps in range(1, 7):
        roots = [steps, 50 + k]
        candidates = grow(children, roots, k, steps)
        for nd in sizes(k, steps):
            tree = best_nodes(candidates, torch.tensor(roots), nd, steps)
            assert tree.tokens_BN[:, 0].tolist() == roots
            for row, root in enumerate(roots):
                assert tree_paths(tree, row) == brute_force(children, root, k, steps, nd), (steps, nd)
            if nd <= 40:
                assert_sound(tree)


def test_the_largest_tree_is_sound() -> None:
    """Keeps out: a mask that walks too few levels in a wide tree."""
    candidates = grow(certain_children, [1], 4, 6)
    assert_sound(best_nodes(candidates, torch.tensor([1]), 85, 6))


def test_rows_do_not_see_each_other() -> None:
    """Keeps out: an index that counts over the whole batch."""
    roots = list(range(7))
    order = [4, 1, 6, 0, 2, 5, 3]
    for children in (random_children, certain_children):
        tree = best_nodes(grow(children, roots, 4, 4), torch.tensor(roots), 20, 4)
        moved = best_nodes(grow(children, [roots[i] for i in order], 4, 4), torch.tensor(order), 20, 4)
        for name in ("tokens_BN", "parents_BN", "depths_BN", "mask_BNN"):
            assert torch.equal(getattr(moved, name), getattr(tree, name)[order]), name


def test_one_branch_is_a_chain() -> None:
    """Keeps out: a special case for chains that gives another tree than the general code gives for k = 1."""
    for steps in (1, 3, 6):
        candidates = grow(random_children, [3, 9], 1, steps)
        tree = best_nodes(candidates, torch.tensor([3, 9]), steps + 1, steps)
        chain = DraftTree.chain(torch.cat((torch.tensor([[3], [9]]), candidates.tokens_BC), dim=1))
        for name in ("tokens_BN", "parents_BN", "depths_BN", "mask_BNN"):
            assert torch.equal(getattr(chain, name), getattr(tree, name)), name
        assert chain.max_depth == tree.max_depth and chain.is_chain and not tree.is_chain
