"""Which path of the tree the target takes.  Pure tensor code over a tree and the target's token at each of its nodes.

One rule serves greedy and sampled decoding.  The target's token at a node is its argmax, or a sample drawn with noise that is
fixed for (seed, position); the walk goes on while a child holds that very token.  Every emitted token is thus the target's own
choice, whatever the draft proposed: exact for any tree.  A child is accepted with the probability the target gives it, as in
the target-only rule that tests children one by one against one uniform number.

Shapes: B sequences, N nodes, E = max_depth + 1 places on a path.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.tree import DraftTree


class Accepted(NamedTuple):
    """path_BE: int64 nodes from the root on; behind accepted_B it repeats its own column number (a harmless node).

    accepted_B: int64 draft tokens accepted (a).  tokens_BE: emitted tokens, a accepted ones, then the bonus; rest padding.
    """

    path_BE: Tensor
    accepted_B: Tensor
    tokens_BE: Tensor


def accept_path(tree: DraftTree, target_tokens_BN: Tensor) -> Accepted:
    """Walks every tree at once: a node is taken if it and all its ancestors hold the token chosen at their parents.

    Siblings hold distinct tokens, so the nodes taken form one path, and their order is the path's.
    """
    B, N = tree.tokens_BN.shape
    E = tree.max_depth + 1
    if N == 1:  # plain decoding: the root's token is the bonus
        nothing_B = target_tokens_BN.new_zeros(B)
        return Accepted(nothing_B[:, None], nothing_B, target_tokens_BN)
    chosen_BN = target_tokens_BN.gather(1, tree.parents_BN)
    missed_BN = tree.tokens_BN != chosen_BN
    missed_BN[:, 0] = False
    off_path_BN = (tree.mask_BNN & missed_BN[:, None]).any(-1)
    accepted_B = N - 1 - off_path_BN.sum(-1)
    nodes_E = torch.arange(E, device=off_path_BN.device)
    first_BE = torch.sort(off_path_BN.byte(), dim=-1, stable=True).indices[:, :E]
    path_BE = torch.where(nodes_E <= accepted_B[:, None], first_BE, nodes_E)
    return Accepted(path_BE, accepted_B, target_tokens_BN.gather(1, path_BE))
