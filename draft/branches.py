"""What the head reads at one step of a tree: each branch's feature, place, and the slots of its own path.

KV slots are immutable within a round, one per (level, branch).  Each branch carries the table of its own ancestors' slots,
re-gathered by parent at every step, which is the topk-expanded page table itself: ancestry is exact.

Knows beams and slots, neither scores nor heads.

Shapes: B sequences, K topk, R = B * K branches, P parents of a sequence (1 before the first step, then K), H hidden,
W steps so far.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.attention.plan import fill_draft_suffix, slots_at
from specdec.attention.segment import Segment
from specdec.ops.launch import use_kernels


class Branches(NamedTuple):
    """hidden_RH: the features.  positions_R, slots_R: int64.  suffix: W + 1 slots a row, the branch's own last."""

    hidden_RH: Tensor
    positions_R: Tensor
    slots_R: Tensor
    suffix: Segment


def fork(
    page_table_BW: Tensor, lens_B: Tensor, parents_BK: Tensor, hidden: Tensor, ancestors: Tensor, page_size: int
) -> Branches:
    """The next step's branches.  Branch k of sequence b goes on from row b * P + parents_BK[b, k] of the last step.

    hidden: [B * P, H] of the last step's rows.  ancestors: [B * P, W] int32, their slots so far; W is 0 at the first step.
    """
    if use_kernels(hidden):
        from specdec.draft.branches_triton import launch_fork

        return Branches(*launch_fork(page_table_BW, lens_B, parents_BK, hidden, ancestors, page_size))
    (B, K), W, H = parents_BK.shape, ancestors.shape[1], hidden.shape[1]
    P = hidden.shape[0] // B
    branches_K = torch.arange(K, device=lens_B.device)
    slots_BK = slots_at(page_table_BW, lens_B[:, None] + W * K + branches_K, page_size)
    parents_BK1 = parents_BK[..., None]
    inherited_BKW = ancestors.view(B, P, W).gather(1, parents_BK1.expand(B, K, W))
    suffix = replace(Segment.empty(B * K, W + 1, 1, device=lens_B.device), base_B=lens_B)
    fill_draft_suffix(suffix, torch.cat((inherited_BKW, slots_BK[..., None]), dim=-1), W)
    hidden_BKH = hidden.view(B, P, H).gather(1, parents_BK1.expand(B, K, H))
    positions_BK = (lens_B.long()[:, None] + W).expand(B, K)
    return Branches(hidden_BKH.flatten(0, 1), positions_BK.flatten(), slots_BK.flatten(), suffix)
