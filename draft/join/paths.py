"""The paths of a round: those of every source, then a drafter's chain where that has no scores, and how likely each token is.

On a CPU the definition here runs; on a GPU it is one launch of paths_triton.py after the sources' own.  It knows survival and
no tree but a chain; sources know what paths say.

Shapes: R rows of the batch, B of them running, P paths of a row (the last is the chain's), D tokens of a path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.batch.tree import DraftTree
from specdec.draft.join.join import nodes_of_paths
from specdec.draft.join.survival import ONCE, Survival
from specdec.ops.index import use_index_kernels


class Paths(NamedTuple):
    """tokens_BPD: int64, -1 after a path's end.  lengths_BP: int64, how many tokens before each path matched; 0 for a chain.
    support_BP: int64, what else speaks for the path, see `survival.support_of`; ONCE for a chain.
    classes_P: int64, the class of each path; see Survival.
    parts_BP: int64, the depth at which the path parts from the drafter's tree: a node there has children, of which none is the
        path's; -1: it does nowhere.  `end_paths` writes it.
    """

    tokens_BPD: Tensor
    lengths_BP: Tensor
    support_BP: Tensor
    classes_P: Tensor
    parts_BP: Tensor

    @classmethod
    def empty(cls, rows: int, classes: Sequence[int], depth: int, device: torch.device) -> Paths:
        """Paths without tokens.  classes: of each path."""
        P = len(classes)
        tokens_RPD = torch.full((rows, P, depth), -1, dtype=torch.int64, device=device)
        lengths_RP, support_RP, parts_RP = (torch.zeros(rows, P, dtype=torch.int64, device=device) for _ in range(3))
        classes_P = torch.tensor(list(classes), dtype=torch.int64, device=device)
        return cls(tokens_RPD, lengths_RP, support_RP, classes_P, parts_RP)

    def with_classes(self, classes: Sequence[int]) -> Paths:
        """Paths of other classes and fewer of them in the same memory, so that one of both is in use at a time."""
        (rows, P, depth), count, device = self.tokens_BPD.shape, len(classes), self.tokens_BPD.device
        assert count <= P
        tokens_RPD = self.tokens_BPD.view(-1)[: rows * count * depth].view(rows, count, depth)
        by_path = (x.view(-1)[: rows * count].view(rows, count) for x in (self.lengths_BP, self.support_BP, self.parts_BP))
        lengths_RP, support_RP, parts_RP = by_path
        classes_P = torch.tensor(list(classes), dtype=torch.int64, device=device)
        return Paths(tokens_RPD, lengths_RP, support_RP, classes_P, parts_RP)

    def narrow(self, rows: int) -> Paths:
        """Those of the first rows."""
        by_path = self.lengths_BP[:rows], self.support_BP[:rows], self.classes_P, self.parts_BP[:rows]
        return Paths(self.tokens_BPD[:rows], *by_path)

    def of_source(self, first: int, count: int) -> Paths:
        """Some adjacent paths of each row."""
        own = slice(first, first + count)
        by_path = self.lengths_BP[:, own], self.support_BP[:, own], self.classes_P[own], self.parts_BP[:, own]
        return Paths(self.tokens_BPD[:, own], *by_path)


def end_paths(paths: Paths, tree: DraftTree, survival: Survival, depth: int) -> Tensor:
    """[B, P, D] float32: the logarithm of each step's rate.  It writes the last path, which no source does.

    tree: the drafter's; its tokens are the last path if it has no scores, and then it is a chain.  depth: D, at most that of
    `paths`.
    """
    if use_index_kernels(paths.tokens_BPD):
        from specdec.draft.join.paths_triton import launch_rates

        return launch_rates(paths, tree, survival, depth)
    chain_BD = paths.tokens_BPD[:, -1]
    chain_BD.fill_(-1)
    paths.lengths_BP[:, -1] = 0
    paths.support_BP[:, -1] = ONCE
    if tree.scores_BN is None:
        chain_BD[:, : tree.max_depth] = tree.tokens_BN[:, 1:]
    paths.parts_BP.copy_(parting_depths(tree, paths.tokens_BPD[..., :depth]))
    paths.parts_BP[:, -1] = -1
    return survival.log_rates(paths, depth)


def parting_depths(tree: DraftTree, tokens_BPD: Tensor) -> Tensor:
    """[B, P] int64: where each path parts from the tree; see Paths."""
    nodes_BPD, N = nodes_of_paths(tree, tokens_BPD), tree.num_nodes
    is_parent_BN = torch.zeros_like(tree.tokens_BN).scatter_(1, tree.parents_BN[:, 1:], 1)
    inside_BP = (nodes_BPD >= 0).sum(-1)
    last_BP1 = nodes_BPD.gather(2, (inside_BP - 1).clamp(min=0)[..., None])
    at_BP = torch.where(inside_BP > 0, last_BP1[..., 0], 0).clamp(0, N - 1)
    return torch.where(is_parent_BN.gather(1, at_BP) > 0, inside_BP, -1)
