"""From candidates to the tree that is verified: the best nodes, in an order in which parents come before their children.

Shapes: B sequences, C candidates, N nodes, M = N - 1 nodes below the root.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.batch.tree import DraftTree
from specdec.draft.tree.expand import Candidates
from specdec.ops.launch import use_kernels
from specdec.ops.topk import stable_topk

MAX_KERNEL_CANDIDATES = 8192  # threshold: one program holds all of a sequence's candidates in registers


def best_nodes(candidates: Candidates, root_B: Tensor, num_draft_tokens: int, num_steps: int, bits: int = 0) -> DraftTree:
    """The root and the num_draft_tokens - 1 best candidates by score (EAGLE-2, arXiv 2406.16858); ties go to the lower index.

    root_B: int64, the root's token, which is the last emitted one.
    bits: where candidates have sources: these stand so many bits above the token, and become the tree's.
    A parent's score is at least its child's, and its index is lower.  So a parent is chosen whenever its child is, and the
    ascending order of candidates puts parents first.  Where a score is no number, all scores below it are none either; such
    scores count as the lowest, so that this holds for them, too.
    Up to 8,192 candidates are chosen by one kernel launch, more by torch.
    """
    max_depth = min(num_steps, num_draft_tokens - 1)
    if candidates.scores_BC.shape[1] <= MAX_KERNEL_CANDIDATES and use_kernels(candidates.scores_BC):
        from specdec.draft.tree.build_tree_triton import launch_best_nodes

        tokens_BN, parents_BN, kept_BN, sources_BN = launch_best_nodes(candidates, root_B, num_draft_tokens, bits)
        return DraftTree(tokens_BN, parents_BN, max_depth, scores_BN=kept_BN, sources_BN=sources_BN)
    scores_BC = candidates.scores_BC.nan_to_num(-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    _, chosen_BM = stable_topk(scores_BC, num_draft_tokens - 1)
    chosen_BM = chosen_BM.sort(dim=1).values
    parents_BM = candidates.parents_BC.gather(1, chosen_BM)
    # Children of the root have parent -1: the search puts -1 at place 0, which is the root's own node number.
    nodes_BM = torch.searchsorted(chosen_BM, parents_BM) + (parents_BM >= 0)
    tokens_BN = torch.cat((root_B[:, None], candidates.tokens_BC.gather(1, chosen_BM)), dim=1)
    parents_BN = torch.cat((torch.zeros_like(root_B)[:, None], nodes_BM), dim=1)
    kept_BN = torch.cat((torch.zeros_like(scores_BC[:, :1]), scores_BC.gather(1, chosen_BM)), dim=1)
    if not bits:
        return DraftTree(tokens_BN, parents_BN, max_depth, scores_BN=kept_BN)
    return DraftTree(tokens_BN & (2**bits - 1), parents_BN, max_depth, scores_BN=kept_BN, sources_BN=tokens_BN >> bits)
