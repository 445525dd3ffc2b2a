"""Which candidates follow each candidate of the level before, likeliest first: all that trees of a DFlash2 head need.

What follows a node depends on its level and its token alone, and a level has C tokens: so all scores of a block are computed at
once.  On a CPU the definition here runs; on a GPU it is one launch of children_triton.py.

Shapes: B sequences, S levels, C candidates of a level, P = C of the level before (C times the root before the first), K
children of each, r rank, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.ops.launch import use_kernels
from specdec.ops.noise.gumbel import Noise
from specdec.ops.topk import stable_topk

MAX_KERNEL_CANDIDATES = 32  # threshold: a program holds the ranks of all pairs of three candidates in registers


def best_children(
    own_BSC: Tensor,
    tokens_BSC: Tensor,
    root_B: Tensor,
    gates_BSr: Tensor,
    predecessor_Vr: Tensor,
    successor_Vr: Tensor,
    children: int,
    noise: Noise | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-probabilities among the candidates [B, S, P, K] float32, best first; which candidates these are, int64).

    own_BSC: float32, the candidates' own logits, or any numbers that differ from them by the same for each row.
    tokens_BSC: int64.  root_B: int64, the token before the first level.  gates_BSr: see selector.py.  children: K.
    noise: of which own_BSC has its part already; what the token before adds is weighed as logits are.  None: there is none.
    """
    if own_BSC.shape[2] <= MAX_KERNEL_CANDIDATES and use_kernels(gates_BSr):
        from specdec.draft.block.dflash2.children_triton import launch_best_children

        return launch_best_children(own_BSC, tokens_BSC, root_B, gates_BSr, predecessor_Vr, successor_Vr, children, noise)
    first_B1C = root_B[:, None, None].expand(-1, 1, tokens_BSC.shape[2])
    before_BSP = torch.cat((first_B1C, tokens_BSC[:, :-1]), dim=1)
    wide = torch.promote_types(gates_BSr.dtype, torch.float32)
    gated_BSPr = F.embedding(before_BSP, predecessor_Vr).to(wide) * gates_BSr[:, :, None].to(wide)
    added_BSPC = (gated_BSPr @ F.embedding(tokens_BSC, successor_Vr).to(wide).mT).float()
    if noise is not None:
        added_BSPC = added_BSPC * noise.logit_weights[:, None, None, None]
    scores_BSPC = own_BSC[:, :, None] + added_BSPC
    scores_BSPC = torch.where(scores_BSPC.isnan(), -torch.inf, scores_BSPC)
    best_BSPK, at_BSPK = stable_topk(scores_BSPC, children)
    return best_BSPK - scores_BSPC.logsumexp(-1, keepdim=True), at_BSPK
