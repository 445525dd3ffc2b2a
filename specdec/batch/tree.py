"""The draft tree and what follows from its parents.  This module knows neither the drafter nor the verifier.

Shapes: B sequences, N nodes (the root is node 0; a parent comes before its children), S levels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.generation import NOBODY
from specdec.ops.index import predecessors

NEVER = -2  # in place of a token; -1 is what a target without finite logits chooses


@dataclass(frozen=True)
class DraftTree:
    """The trees of one round, one for each sequence.

    tokens_BN: int64 ids of the target's vocabulary; column 0 is the root, the last emitted token.
    parents_BN: int64, each node's parent; the root is its own parent.
    max_depth: the deepest level that can occur; known to the host.
    is_chain: whether node n's parent is node n - 1 in every sequence, so nodes are in order of position; known to the host.
    scores_BN: float32, for each node the logarithm of its survival, as its drafter estimates it: of the probability that it is
        accepted.  The root's is 0, and a node's is at most its parent's.  None: the drafter makes no estimate.
    sources_BN: int64, a bit for each source that proposed the node, see DraftModel.sources; NOBODY where the row does without
        them; 0 for the root, and where a grammar did.  None: there is one source.

    Depths and masks follow from the parents, and are computed when they are asked for.  Kernels walk the parents instead.
    """

    tokens_BN: Tensor
    parents_BN: Tensor
    max_depth: int
    is_chain: bool = False
    scores_BN: Tensor | None = None
    sources_BN: Tensor | None = None

    @property
    def num_nodes(self) -> int:
        """N, the number of nodes, root included."""
        return self.tokens_BN.shape[1]

    @property
    def mask_BNN(self) -> Tensor:
        """[B, N, N] bool: row n marks the nodes that node n may read, which are its ancestors and itself."""
        B, N = self.parents_BN.shape
        nodes_N = torch.arange(N, dtype=torch.int64, device=self.parents_BN.device)
        mask_BNN = (nodes_N == nodes_N[:, None]).expand(B, N, N)
        above_BN = self.parents_BN
        for level in range(self.max_depth):
            mask_BNN = mask_BNN | (nodes_N == above_BN[..., None])
            if level + 1 < self.max_depth:
                above_BN = self.parents_BN.gather(1, above_BN)
        return mask_BNN

    @property
    def depths_BN(self) -> Tensor:
        """[B, N] int64: each node's level, 0 for the root."""
        return self.mask_BNN.sum(-1) - 1

    def find_sources(self, drafted: DraftTree) -> None:
        """Sets each node's sources to those of the node with the same path in another tree, and to 0 if that has none.

        drafted: what this tree was before its tokens and parents changed.
        """
        assert self.sources_BN is not None and drafted.sources_BN is not None
        nodes_N = torch.arange(self.num_nodes, dtype=torch.int64, device=self.tokens_BN.device)
        same_BNN = (self.tokens_BN[..., None] == drafted.tokens_BN[:, None]) & (nodes_N > 0)
        there_BN = torch.where(nodes_N > 0, -1, torch.zeros_like(self.tokens_BN))
        for _ in range(self.max_depth):
            above_BN = there_BN.gather(1, self.parents_BN)
            is_it_BNN = same_BNN & (drafted.parents_BN[:, None] == above_BN[..., None])
            there_BN = torch.where(nodes_N > 0, torch.where(is_it_BNN, nodes_N, -1).amax(-1), 0)
        self.sources_BN.copy_(torch.where(there_BN > 0, drafted.sources_BN.gather(1, there_BN.clamp(min=0)), 0))

    def of_source(self, bit: int) -> DraftTree:
        """The tree, of which one source has proposed all nodes."""
        sources_BN = torch.full_like(self.tokens_BN, bit)
        sources_BN[:, 0] = 0
        return replace(self, sources_BN=sources_BN)

    def without(self, allowed_B: Tensor) -> DraftTree:
        """The tree of rows that do without some sources: nodes that these alone propose are nobody's.

        allowed_B: int64, the bits of the sources that each row has.
        """
        assert self.sources_BN is not None
        sources_BN = self.sources_BN & allowed_B[:, None]
        is_left_BN = (sources_BN == 0) & (self.sources_BN != 0)
        return replace(self, sources_BN=sources_BN.masked_fill(is_left_BN, NOBODY))

    @property
    def to_accept(self) -> DraftTree:
        """The tree as acceptance is to see it: nobody's nodes hold a token that a target never chooses."""
        if self.sources_BN is None:
            return self
        return replace(self, tokens_BN=self.tokens_BN.masked_fill(self.sources_BN >= NOBODY, NEVER))

    @classmethod
    def chain(cls, tokens_BN: Tensor) -> DraftTree:
        """A tree in which every node but the last has one child.  Plain decoding uses a chain of one node, the root."""
        B, N = tokens_BN.shape
        return cls(tokens_BN, predecessors(N, tokens_BN.device).expand(B, N), N - 1, is_chain=True)
