"""From continuations to one tree: common beginnings become common nodes, and the best of them are kept.

Knows tokens and scores, neither texts nor pages.

Shapes: B sequences, M continuations, S tokens of each, N nodes, C = M * S candidates; candidate m * S + s is token s of
continuation m.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specdec.batch.tree import DraftTree
from specdec.draft.tree.build_tree import best_nodes
from specdec.draft.tree.expand import Candidates
from specdec.ops.index import arange

DECAY = 0.8  # how likely a continuation is to be right for one more token


def grow(tokens_BMS: Tensor, lengths_BM: Tensor, root_B: Tensor, num_draft_tokens: int) -> DraftTree:
    """The tree of the best nodes of these continuations, see `candidates_of`.

    Shares choose the nodes, and become logarithms afterwards: as logarithms other nodes would tie.  A node that only fills the
    tree never survives.
    """
    tree = best_nodes(candidates_of(tokens_BMS, lengths_BM), root_B, num_draft_tokens, tokens_BMS.shape[2])
    assert tree.scores_BN is not None
    scores_BN = tree.scores_BN.clamp(min=0).log()
    scores_BN[:, 0] = 0  # the root, whose share best_nodes gives as 0
    return replace(tree, scores_BN=scores_BN)


def candidates_of(tokens_BMS: Tensor, lengths_BM: Tensor) -> Candidates:
    """The candidates of trees whose paths are these continuations.

    tokens_BMS: int64.  lengths_BM: int64, how many tokens before each continuation matched; longer matches weigh more.

    A node's score is the share of all weight that goes through it, times DECAY a level: no logarithm yet.  Of continuations
    that begin alike only the first one has the common nodes.  The others' places are filled with children of the root that hold
    tokens which no other child of the root holds, with the lowest score: a tree has a fixed number of nodes, and siblings must
    differ.
    """
    B, M, S = tokens_BMS.shape
    C, device = M * S, tokens_BMS.device
    same_BMMS = (tokens_BMS[:, :, None] == tokens_BMS[:, None]).cumprod(-1).bool()  # [b, m, n, s]: equal up to token s
    numbers_M, places_S = arange(M, device), arange(S, device)
    first_BMS = torch.where(same_BMMS, numbers_M[:, None], M).amin(2)  # the first continuation that begins alike
    weights_BM = (lengths_BM + 1).float()
    through_BMS = (same_BMMS * weights_BM[:, None, :, None]).sum(2)
    scores_BMS = through_BMS / weights_BM.sum(1)[:, None, None] * DECAY ** places_S.float()
    above_BMS = first_BMS.roll(1, dims=2) * S + places_S - 1
    above_BMS = torch.where(places_S == 0, -1, above_BMS)
    is_node_BMS = first_BMS == numbers_M[:, None]
    # Of C + M ids at least C are held by no continuation's first token.
    is_held_BX = (arange(C + M, device)[:, None] == tokens_BMS[:, None, :, 0]).any(-1)
    fill_BMS = is_held_BX.byte().sort(dim=1, stable=True).indices[:, :C].view(B, M, S)
    return Candidates(
        tokens_BC=torch.where(is_node_BMS, tokens_BMS, fill_BMS).flatten(1),
        scores_BC=torch.where(is_node_BMS, scores_BMS, -1.0).flatten(1),
        parents_BC=torch.where(is_node_BMS, above_BMS, -1).flatten(1),
    )
