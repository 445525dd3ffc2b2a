"""Random draft trees: their shapes, their tokens, and which nodes each node sees.  By the definition, a node at a time."""

import random

import torch
from torch import Tensor

from specdec.batch.tree import DraftTree


def path_depth(parents: list[int], node: int) -> int:
    depth = 0
    while node:
        node, depth = parents[node], depth + 1
    return depth


def chain_shape(nd: int) -> tuple[list[int], set[int]]:
    return [0, *range(nd - 1)], set(range(1, nd))


def random_shape(nd: int, steps: int, rng: random.Random) -> tuple[list[int], set[int]]:
    """Parents of a random tree of at most `steps` levels, and the nodes of one path as deep as it can be."""
    main = set(rng.sample(range(1, nd), min(steps, nd - 1)))
    parents, depths, above = [0], [0], 0
    for node in range(1, nd):
        if node in main:
            parent, above = above, node
        else:
            parent = rng.choice([n for n in range(node) if depths[n] < min(steps, nd - 1)])
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return parents, main


def random_tokens(parents: list[int], vocab_size: int, rng: random.Random) -> list[int]:
    """A token for each node; siblings hold distinct ones, and nothing else is distinct."""
    tokens, orders = [rng.randrange(vocab_size)], dict[int, list[int]]()
    for parent in parents[1:]:
        if parent not in orders:
            orders[parent] = rng.sample(range(vocab_size), min(vocab_size, len(parents)))
        tokens.append(orders[parent].pop())
    return tokens


def random_trees(rows: int, nd: int, steps: int, vocab_size: int, rng: random.Random, chain: bool = False) -> DraftTree:
    """Trees of random shape for a batch."""
    parents = [(chain_shape(nd) if chain else random_shape(nd, steps, rng))[0] for _ in range(rows)]
    tokens_BN = torch.tensor([random_tokens(row, vocab_size, rng) for row in parents])
    if chain:
        return DraftTree.chain(tokens_BN)
    return DraftTree(tokens_BN, torch.tensor(parents), min(steps, nd - 1))


def mask_of(parents: list[int]) -> Tensor:
    """[N, N] bool: a node sees itself and its ancestors."""
    mask_NN = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents[1:], 1):
        mask_NN[node] |= mask_NN[parent]
    return mask_NN


def random_masks(rows: int, nd: int, seed: int, steps: int | None = None) -> Tensor:
    """[B, N, N] bool of trees of random shape.  steps: levels, half as many as nodes if nothing is said."""
    rng = random.Random(seed)
    return torch.stack([mask_of(random_shape(nd, steps or max(1, nd // 2), rng)[0]) for _ in range(rows)])


def children_of(parents: list[int]) -> dict[int, list[int]]:
    return {n: [m for m in range(1, len(parents)) if parents[m] == n] for n in range(len(parents))}
