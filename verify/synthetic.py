"""Synthetic acceptance: the target's tokens are overwritten so that drafts are accepted with given probabilities.

This is for capacity planning: it shows what a head of a certain quality would be worth before it is trained.  The text is not
the target's, and a round takes a few small kernels more.  It is pure tensor code without synchronisation, so it runs inside a
CUDA graph.  It knows neither the target nor the drafter.

Shapes: B sequences, N nodes, S levels, W = N + 1 places of a table of shifts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.batch.tree import DraftTree
from specdec.ops.noise.gumbel import mix_64

_STREAM = 0xD1B54A32D192ED03 - 2**64  # an odd constant that differs from the sampler's, so the two noises differ


@dataclass(frozen=True)
class SyntheticAcceptance:
    """probs_S: float64 on the device; entry d is P(level d + 1 is accepted, given that level d was).

    A round accepts along the tree's best path and nowhere else.  Where that path ends early (its next node was pruned, or the
    tree is not that deep), the round ends too, so measured acceptance may lie below these probabilities.
    """

    probs_S: Tensor
    vocab_size: int

    @classmethod
    def of(cls, probs: Sequence[float], vocab_size: int, device: torch.device | str) -> SyntheticAcceptance:
        """probs: one number in [0, 1] for each level of the tree.

        vocab_size: the target's; it must exceed the number of children of any node.
        """
        assert probs and all(0 <= p <= 1 for p in probs), probs
        return cls(torch.tensor(probs, dtype=torch.float64, device=device), vocab_size)

    def force(self, tree: DraftTree, target_tokens_BN: Tensor, seed_B: Tensor, lens_B: Tensor, speculates_B: Tensor) -> Tensor:
        """[B, N] int64: the tokens by which to accept, in place of the target's own.

        seed_B: each row's seed.
        lens_B: each row's committed length.
        speculates_B: 0 where a row does not speculate: it keeps the target's own tokens.
        A node whose best child is to be accepted gets that child's token.  Any other node keeps its own token, or if some child
        holds that one, the next token that no child holds.  The choice depends on (seed, position) alone, so equal runs accept
        alike.  A token of -1, which says that the logits were not finite, stays.
        """
        if tree.num_nodes == 1:  # plain decoding has nothing to accept
            return target_tokens_BN
        depths_BN, (best_BN, has_child_BN) = tree.depths_BN, best_children(tree)
        prob_BN = self.probs_S[depths_BN.clamp(max=self.probs_S.shape[0] - 1)]
        accept_BN = has_child_BN & (uniform_noise(seed_B, lens_B[:, None] + depths_BN) < prob_BN)
        refused_BN = unlike_children(tree, target_tokens_BN, self.vocab_size)
        forced_BN = torch.where(accept_BN, tree.tokens_BN.gather(1, best_BN), refused_BN)
        keeps_BN = (target_tokens_BN < 0) | (speculates_B[:, None] == 0)
        return torch.where(keeps_BN, target_tokens_BN, forced_BN)


def best_children(tree: DraftTree) -> tuple[Tensor, Tensor]:
    """(first child of each node, or 0; whether there is a child), [B, N] each.  A node's first child is its best by score."""
    B, N = tree.tokens_BN.shape
    nodes_N = torch.arange(N, dtype=torch.int64, device=tree.tokens_BN.device)
    child_N = torch.where(nodes_N == 0, N, nodes_N)  # the root is stored as its own parent, but it is no child
    first_BN = child_N.new_full((B, N), N).scatter_reduce(1, tree.parents_BN, child_N.expand(B, N), "amin")
    has_child_BN = first_BN < N
    return torch.where(has_child_BN, first_BN, 0), has_child_BN


def unlike_children(tree: DraftTree, target_tokens_BN: Tensor, vocab_size: int) -> Tensor:
    """[B, N] int64: each node's target token, or the next one (cyclic over the vocabulary) that none of its children holds."""
    B, N = tree.tokens_BN.shape
    W = N + 1  # N - 1 children block at most N - 1 shifts; the last place collects those that block none
    shift_BN = (tree.tokens_BN - target_tokens_BN.gather(1, tree.parents_BN)) % vocab_size
    shift_BN = shift_BN.clamp(max=N)
    shift_BN[:, 0] = N
    blocked_BNW = torch.zeros(B, N * W, dtype=torch.int32, device=shift_BN.device)
    blocked_BNW.scatter_(1, tree.parents_BN * W + shift_BN, 1)
    free_BN = blocked_BNW.view(B, N, W).argmin(-1)  # the first 0
    return (target_tokens_BN + free_BN) % vocab_size


def uniform_noise(seed_B: Tensor, position_BN: Tensor) -> Tensor:
    """[B, N] float64 within (0, 1), a pure function of (seed, position)."""
    bits_BN = mix_64(mix_64(seed_B + _STREAM)[:, None] + position_BN * _STREAM)
    return (((bits_BN >> 12) & (2**52 - 1)).double() + 0.5) * 2.0**-52
