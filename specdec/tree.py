"""The draft tree and its pure relations.  Knows neither who drew it nor who will verify it.

Shapes: B sequences, N nodes (the root is node 0; a parent comes before its children), S levels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftTree:
    """The candidates of one round.

    tokens_BN: int64 target-vocabulary ids; column 0 is the root, the last emitted token.
    parents_BN: int64, each node's parent; the root is its own.
    depths_BN: int64, 0 for the root.
    mask_BNN: bool, row n marks the nodes that n may see: its ancestors and itself.
    max_depth: the deepest level that can occur; host knowledge.
    is_chain: node n's parent is n - 1 in every sequence, so position order is node order; host knowledge.
    """

    tokens_BN: Tensor
    parents_BN: Tensor
    depths_BN: Tensor
    mask_BNN: Tensor
    max_depth: int
    is_chain: bool = False

    @property
    def num_nodes(self) -> int:
        return self.tokens_BN.shape[1]

    @classmethod
    def from_parents(cls, tokens_BN: Tensor, parents_BN: Tensor, max_depth: int) -> DraftTree:
        """Depths and masks follow from the parents.  Exact for trees of at most max_depth levels."""
        mask_BNN = ancestor_mask(parents_BN, max_depth)
        return cls(tokens_BN, parents_BN, mask_BNN.sum(-1) - 1, mask_BNN, max_depth)

    @classmethod
    def chain(cls, tokens_BN: Tensor) -> DraftTree:
        """Every node has one child.  One node alone is plain decoding's tree: only the root."""
        B, N = tokens_BN.shape
        nodes = torch.arange(N, device=tokens_BN.device)
        return cls(
            tokens_BN,
            (nodes - 1).clamp(min=0).expand(B, N),
            nodes.expand(B, N),
            (nodes[:, None] >= nodes).expand(B, N, N),
            max_depth=N - 1,
            is_chain=True,
        )


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
