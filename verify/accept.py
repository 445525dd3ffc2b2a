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

from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.ops.index import use_index_kernels


class Accepted(NamedTuple):
    """path_BE: int64 nodes from the root on; after accepted_B it repeats its own column number (a harmless node).

    accepted_B: int64 draft tokens accepted (a).  tokens_BE: emitted tokens, a accepted ones, then the bonus; rest padding.
    emitted_BX: what the host reads, X = E + 1: a, then the same tokens.  A target token of -1 says that there is none, since
    the logits were not finite: emitted_BX keeps it, and tokens_BE has the token 0 instead, so that the device can go on.
    """

    path_BE: Tensor
    accepted_B: Tensor
    tokens_BE: Tensor
    emitted_BX: Tensor

    @classmethod
    def of(cls, path_BE: Tensor, accepted_B: Tensor, tokens_BE: Tensor) -> Accepted:
        """tokens_BE: with -1 where there is none."""
        return cls(path_BE, accepted_B, tokens_BE.clamp(min=0), torch.cat((accepted_B[:, None], tokens_BE), dim=1))


def accept_path(tree: DraftTree, target_tokens_BN: Tensor) -> Accepted:
    """Walks every tree at once: a node is taken if it and all its ancestors hold the token chosen at their parents.

    Siblings hold distinct tokens, so the nodes taken form one path, and their order is the path's.
    """
    N = tree.num_nodes
    E = tree.max_depth + 1
    if N == 1:  # plain decoding: the root's token is the bonus
        nothing_B = target_tokens_BN.new_zeros(target_tokens_BN.shape[0])
        return Accepted.of(nothing_B[:, None], nothing_B, target_tokens_BN)
    hit_BN = tree.tokens_BN == target_tokens_BN.gather(1, tree.parents_BN)
    hit_BN[:, 0] = True
    taken_BN = hit_BN
    for _ in range(tree.max_depth - 1):  # after i turns: the node and the i + 1 above it
        taken_BN = hit_BN & taken_BN.gather(1, tree.parents_BN)
    accepted_B = taken_BN.sum(-1) - 1
    nodes_E = torch.arange(E, device=taken_BN.device)
    first_BE = torch.sort(taken_BN.byte(), dim=-1, descending=True, stable=True).indices[:, :E]
    path_BE = torch.where(nodes_E <= accepted_B[:, None], first_BE, nodes_E)
    return Accepted.of(path_BE, accepted_B, target_tokens_BN.gather(1, path_BE))


def accept(tree: DraftTree, target_tokens_BN: Tensor, state: BatchState) -> tuple[Accepted, Tensor]:
    """`accept_path`; moves lengths (of active rows) and bonus tokens in `state` on.  Also [B] int32: lengths before."""
    if use_index_kernels(target_tokens_BN):
        from specdec.verify.accept_triton import launch_accept

        *accepted, base_lens_B = launch_accept(tree, target_tokens_BN, state)
        return Accepted(*accepted), base_lens_B
    base_lens_B = state.lens_B.clone()
    done = accept_path(tree, target_tokens_BN)
    state.lens_B.add_((done.accepted_B + 1) * state.active_B)
    state.bonus_B.copy_(done.tokens_BE.gather(1, done.accepted_B[:, None])[:, 0])
    return done, base_lens_B
