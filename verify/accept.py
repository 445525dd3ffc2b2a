"""The acceptance rule: which path of the tree the target takes.

This is pure tensor code over a tree and the target's token at each of its nodes.  One rule serves greedy and sampled decoding.
The target's token at a node is its argmax, or a sample drawn with noise that is fixed by (seed, position).  The path continues
as long as some child holds exactly that token.  Every emitted token is therefore the target's own choice, whatever the drafter
proposed, so the output is exact for any tree.  A child is accepted with the probability that the target gives it, as in the
rule that tests children one by one against one uniform number.

Shapes: B sequences, N nodes, E = max_depth + 1 places on a path.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.batch.emitted import EmittedRows
from specdec.batch.state import BatchState
from specdec.batch.tree import DraftTree
from specdec.ops.index import use_index_kernels


class Accepted(NamedTuple):
    """The path that was accepted in each tree.

    path_BE: int64 nodes from the root on.  A column after accepted_B holds its own column number, which is a valid node; nobody
        uses it.
    accepted_B: int64, the number a of accepted draft tokens.
    tokens_BE: int64, the emitted tokens: a accepted ones, then the bonus token; the rest is padding.
    emitted: the same for the host.  A target token of -1 says that there is none, since the logits were not finite: `emitted`
        keeps it, and tokens_BE holds the token 0 instead, so that the device can go on.
    """

    path_BE: Tensor
    accepted_B: Tensor
    tokens_BE: Tensor
    emitted: EmittedRows

    @classmethod
    def of(
        cls, path_BE: Tensor, accepted_B: Tensor, tokens_BE: Tensor, best_B2: Tensor, sources_BN: Tensor | None = None
    ) -> Accepted:  # fmt: skip
        """tokens_BE: with -1 where there is none.  best_B2: see `best_path`.  sources_BN: of the tree."""
        emitted = EmittedRows.of(accepted_B, tokens_BE, best_B2)
        if sources_BN is not None:
            emitted = emitted.with_sources(sources_BN.gather(1, path_BE))
        return cls(path_BE, accepted_B, tokens_BE.clamp(min=0), emitted)


def accept_path(tree: DraftTree, target_tokens_BN: Tensor, speculates_B: Tensor) -> Accepted:
    """Finds the path of every tree at once: a node is taken if it and all its ancestors hold the token chosen at their parents.

    Siblings hold distinct tokens, so the taken nodes form one path, and their node numbers ascend along it.
    speculates_B: int32; where it is 0, the root alone is taken, so that the row emits the target's token after the root.
    """
    N = tree.num_nodes
    E = tree.max_depth + 1
    if N == 1:  # plain decoding: the root's token is the bonus
        nothing_B = target_tokens_BN.new_zeros(target_tokens_BN.shape[0])
        return Accepted.of(nothing_B[:, None], nothing_B, target_tokens_BN, nothing_B[:, None].expand(-1, 2))
    hit_BN = (tree.tokens_BN == target_tokens_BN.gather(1, tree.parents_BN)) & (speculates_B[:, None] > 0)
    hit_BN[:, 0] = True
    taken_BN = hit_BN
    for _ in range(tree.max_depth - 1):  # each turn includes one more ancestor of every node
        taken_BN = hit_BN & taken_BN.gather(1, tree.parents_BN)
    accepted_B = taken_BN.sum(-1) - 1
    nodes_E = torch.arange(E, dtype=torch.int64, device=taken_BN.device)
    first_BE = torch.sort(taken_BN.byte(), dim=-1, descending=True, stable=True).indices[:, :E]
    path_BE = torch.where(nodes_E <= accepted_B[:, None], first_BE, nodes_E)
    best_B2 = best_path(tree, taken_BN)
    return Accepted.of(path_BE, accepted_B, target_tokens_BN.gather(1, path_BE), best_B2, tree.sources_BN)


def best_path(tree: DraftTree, taken_BN: Tensor) -> Tensor:
    """[B, 2] int64: of the path that goes from the root to each node's first child, how many draft tokens were taken; and its
    length.

    A node's first child is the drafter's own first choice, so this is what a chain would have drafted, as far as the tree goes.
    """
    B, N = taken_BN.shape
    nodes_N = torch.arange(N, dtype=torch.int64, device=taken_BN.device)
    at_B = length_B = best_B = taken_BN.new_zeros(B, dtype=torch.int64)
    is_on_B = taken_BN.new_ones(B)
    for _ in range(tree.max_depth):
        is_child_BN = (tree.parents_BN == at_B[:, None]) & (nodes_N > at_B[:, None])
        at_B = torch.where(is_child_BN, nodes_N, N - 1).amin(-1)
        has_child_B = is_child_BN.any(-1)
        is_on_B = is_on_B & has_child_B & taken_BN.gather(1, at_B[:, None])[:, 0]
        length_B, best_B = length_B + has_child_B, best_B + is_on_B
    return torch.stack((best_B, length_B), dim=1)


def accept(tree: DraftTree, target_tokens_BN: Tensor, state: BatchState) -> tuple[Accepted, Tensor]:
    """Runs `accept_path`, and updates lengths (of active rows) and bonus tokens in `state`.

    Inactive rows take their root alone: what they hold may be no tree of distinct siblings.
    The second result is [B] int32: the lengths before the update.
    """
    if use_index_kernels(target_tokens_BN):
        from specdec.verify.accept_triton import launch_accept

        path_BE, accepted_B, tokens_BE, emitted, base_lens_B = launch_accept(tree, target_tokens_BN, state)
        return Accepted(path_BE, accepted_B, tokens_BE, emitted), base_lens_B
    base_lens_B = state.lens_B.clone()
    done = accept_path(tree, target_tokens_BN, state.speculates_B * state.active_B)
    state.lens_B.add_((done.accepted_B + 1) * state.active_B)
    state.bonus_B.copy_(done.tokens_BE.gather(1, done.accepted_B[:, None])[:, 0])
    return done, base_lens_B
