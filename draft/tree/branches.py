"""What the head reads at one step of a tree: each branch's feature, its position, and the slots of its own path.

KV slots are immutable within a round; there is one for each level and branch.  Each branch carries a table of its own
ancestors' slots.  Every step gathers these tables anew by parent, and the gathered table is the topk-expanded page table that
attention reads, so every branch reads exactly its own ancestors.

This module knows branches and slots, neither scores nor heads.

Shapes: B sequences, K topk, R = B * K branches, P parents of a sequence (1 before the first step, then K), H hidden, W steps so
far.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.attention.pages import PageTable
from specdec.attention.plan import fill_draft_suffix
from specdec.attention.segment import Segment
from specdec.ops.launch import use_kernels


class Branches(NamedTuple):
    """One step's branches.

    hidden_RH: each branch's feature.
    positions_R, slots_R: int64.
    suffix: a row for each branch, of W + 1 slots: its ancestors' slots, then its own.
    """

    hidden_RH: Tensor
    positions_R: Tensor
    slots_R: Tensor
    suffix: Segment


def fork(pages: PageTable, lens_B: Tensor, parents_BK: Tensor, hidden: Tensor, ancestors: Tensor) -> Branches:
    """The next step's branches.  Branch k of sequence b continues row b * P + parents_BK[b, k] of the last step.

    pages: of each sequence.  lens_B: int32, its committed length.
    hidden: [B * P, H], the features of the last step's rows.
    ancestors: [B * P, W] int32, the slots of these rows' paths; W is 0 at the first step.
    """
    if use_kernels(hidden):
        from specdec.draft.tree.branches_triton import launch_fork

        return Branches(*launch_fork(pages, lens_B, parents_BK, hidden, ancestors))
    (B, K), W, H = parents_BK.shape, ancestors.shape[1], hidden.shape[1]
    P = hidden.shape[0] // B
    branches_K = torch.arange(K, dtype=torch.int64, device=lens_B.device)
    slots_BK = pages.slots_at(lens_B[:, None] + W * K + branches_K)
    parents_BK1 = parents_BK[..., None]
    inherited_BKW = ancestors.view(B, P, W).gather(1, parents_BK1.expand(B, K, W))
    suffix = replace(Segment.empty(B * K, W + 1, 1, device=lens_B.device), base_B=lens_B)
    fill_draft_suffix(suffix, torch.cat((inherited_BKW, slots_BK[..., None]), dim=-1), W)
    hidden_BKH = hidden.view(B, P, H).gather(1, parents_BK1.expand(B, K, H))
    positions_BK = (lens_B.long()[:, None] + W).expand(B, K)
    return Branches(hidden_BKH.flatten(0, 1), positions_BK.flatten(), slots_BK.flatten(), suffix)
