"""The draft tree and its pure relations.  Knows neither who drew it nor who will verify it.

Shapes: B sequences, N nodes (the root is node 0; a parent comes before its children), S levels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.ops.index import predecessors


@dataclass(frozen=True)
class DraftTree:
    """The candidates of one round.

    tokens_BN: int64 target-vocabulary ids; column 0 is the root, the last emitted token.
    parents_BN: int64, each node's parent; the root is its own.
    max_depth: the deepest level that can occur; host knowledge.
    is_chain: node n's parent is n - 1 in every sequence, so position order is node order; host knowledge.

    Depths and masks follow from the parents, and are computed when asked for; kernels walk the parents instead.
    """

    tokens_BN: Tensor
    parents_BN: Tensor
    max_depth: int
    is_chain: bool = False

    @property
    def num_nodes(self) -> int:
        return self.tokens_BN.shape[1]

    @property
    def mask_BNN(self) -> Tensor:
        """bool, row n marks the nodes that n may see: its ancestors and itself."""
        return ancestor_mask(self.parents_BN, self.max_depth)

    @property
    def depths_BN(self) -> Tensor:
        """int64, 0 for the root."""
        return self.mask_BNN.sum(-1) - 1

    @classmethod
    def from_parents(cls, tokens_BN: Tensor, parents_BN: Tensor, max_depth: int) -> DraftTree:
        """A tree of at most max_depth levels."""
        return cls(tokens_BN, parents_BN, max_depth)

    @classmethod
    def chain(cls, tokens_BN: Tensor) -> DraftTree:
        """Every node has one child.  One node alone is plain decoding's tree: only the root."""
        B, N = tokens_BN.shape
        return cls(tokens_BN, predecessors(N, tokens_BN.device).expand(B, N), N - 1, is_chain=True)


def ancestor_mask(parents_BN: Tensor, max_depth: int) -> Tensor:
    """[B, N, N] bool: row n marks n and its ancestors.  Walks max_depth times from every node to its parent at once."""
    B, N = parents_BN.shape
    nodes_N = torch.arange(N, device=parents_BN.device)
    mask_BNN = (nodes_N == nodes_N[:, None]).expand(B, N, N)
    above_BN = parents_BN
    for level in range(max_depth):
        mask_BNN = mask_BNN | (nodes_N == above_BN[..., None])
        if level + 1 < max_depth:
            above_BN = parents_BN.gather(1, above_BN)
    return mask_BNN
