"""The best tree over tokens that were drafted independently of one another: one distribution for each level.

Every path through the levels' likeliest tokens is a node, whose score is the sum of the log-probabilities along it.  The tree
has the best of all these nodes.  A node's score is at most its parent's, so the best nodes are a tree.  Ties go to the node of
the shallower level, then to the one whose parent comes first in this order, then to the likelier token.

Nodes stand in this order too, after the root.  This is pure tensor code; on a GPU it is one launch of grow_triton.py.

Shapes: B sequences, S levels, K tokens of a level, N nodes with the root, M = N - 1, W nodes of a level that may be chosen.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.batch.tree import DraftTree
from specdec.ops.launch import use_kernels
from specdec.ops.topk import stable_topk

MAX_KERNEL_NODES = 256  # threshold: one warp holds the places at which a tree may go on in registers
MIN_SCORE = -1e30  # in place of a score that is no number


def best_paths(logp_BSK: Tensor, tokens_BSK: Tensor, root_B: Tensor, num_nodes: int) -> DraftTree:
    """The tree of num_nodes nodes.

    logp_BSK: float32, best first.  tokens_BSK: int64.  root_B: int64, the root's token.
    num_nodes: with at least as many paths as nodes below the root.
    """
    max_depth = min(logp_BSK.shape[1], num_nodes - 1)
    if num_nodes <= MAX_KERNEL_NODES and use_kernels(logp_BSK):
        from specdec.draft.block.rounds.grow_triton import launch_best_paths

        tokens_BN, parents_BN, kept_BN = launch_best_paths(logp_BSK, tokens_BSK, root_B, num_nodes)
        return DraftTree(tokens_BN, parents_BN, max_depth, scores_BN=kept_BN)
    (B, S, K), M = logp_BSK.shape, num_nodes - 1
    logp_BSK = torch.where(logp_BSK >= MIN_SCORE, logp_BSK, MIN_SCORE)
    beam_BW, scores, tokens, parents, start = logp_BSK.new_zeros(B, 1), [], [], [], -1
    for level in range(S):
        children_BC = (beam_BW[:, :, None] + logp_BSK[:, level, None]).flatten(1)
        width = beam_BW.shape[1]
        beam_BW, chosen_BW = stable_topk(children_BC, min(M, children_BC.shape[1]))
        scores.append(beam_BW)
        tokens.append(tokens_BSK[:, level].gather(1, chosen_BW % K))
        parents.append(start + chosen_BW // K)  # by number among all levels' nodes; the root is -1
        start += 1 if start < 0 else width
    best_scores_BM, best_BM = stable_topk(torch.cat(scores, dim=1), M)
    above_BM = torch.cat(parents, dim=1).gather(1, best_BM)
    numbers_BC = torch.zeros(B, sum(map(_width, scores)), dtype=torch.int64, device=root_B.device)
    numbers_BC.scatter_(1, best_BM, torch.arange(1, M + 1, dtype=torch.int64, device=root_B.device).expand(B, M))
    parents_BM = torch.where(above_BM < 0, 0, numbers_BC.gather(1, above_BM.clamp(min=0)))
    tokens_BN = torch.cat((root_B[:, None], torch.cat(tokens, dim=1).gather(1, best_BM)), dim=1)
    parents_BN = torch.cat((torch.zeros_like(root_B)[:, None], parents_BM), dim=1)
    kept_BN = torch.cat((torch.zeros_like(best_scores_BM[:, :1]), best_scores_BM), dim=1)
    return DraftTree(tokens_BN, parents_BN, max_depth, scores_BN=kept_BN)


def _width(x_BW: Tensor) -> int:
    return x_BW.shape[1]
