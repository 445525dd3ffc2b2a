"""From candidates to the tree that is verified: the best nodes, in an order where parents come first.

Shapes: B sequences, C candidates, N nodes, M = N - 1 nodes below the root.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.batch.tree import DraftTree
from specdec.draft.expand import Candidates
from specdec.ops.launch import use_kernels
from specdec.ops.topk import stable_topk

MAX_KERNEL_CANDIDATES = 8192  # one program holds them all in registers


def best_nodes(candidates: Candidates, root_B: Tensor, num_draft_tokens: int, num_steps: int) -> DraftTree:
    """The root and the num_draft_tokens - 1 best candidates by score, ties to the lower index.

    A parent scores at least its child's score at a lower index, so it is chosen whenever the child is; and ascending
    candidate order is an order where parents come first.  One launch up to 8,192 candidates; more are chosen by torch.
    """
    max_depth = min(num_steps, num_draft_tokens - 1)
    if candidates.scores_BC.shape[1] <= MAX_KERNEL_CANDIDATES and use_kernels(candidates.scores_BC):
        from specdec.draft.build_tree_triton import launch_best_nodes

        tokens_BN, parents_BN = launch_best_nodes(candidates, root_B, num_draft_tokens)
        return DraftTree.from_parents(tokens_BN, parents_BN, max_depth)
    _, chosen_BM = stable_topk(candidates.scores_BC, num_draft_tokens - 1)
    chosen_BM = chosen_BM.sort(dim=1).values
    parents_BM = candidates.parents_BC.gather(1, chosen_BM)
    # -1, the root, is searched for as well: it finds place 0, and becomes node 0 by the same arithmetic.
    nodes_BM = torch.searchsorted(chosen_BM, parents_BM) + (parents_BM >= 0)
    tokens_BN = torch.cat((root_B[:, None], candidates.tokens_BC.gather(1, chosen_BM)), dim=1)
    parents_BN = torch.cat((torch.zeros_like(root_B)[:, None], nodes_BM), dim=1)
    return DraftTree.from_parents(tokens_BN, parents_BN, max_depth)
