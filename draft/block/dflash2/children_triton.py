"""The kernel of children.py: one program scores all pairs of candidates of a level and the level before, and orders them.

A child's place among its siblings is how many of these are better, or equally good and first.  So nothing is sorted.

Shapes: B sequences, S levels, C candidates of a level, P = C of the level before, K children, r rank, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained
from specdec.ops.noise.gumbel import Noise

RANK_BLOCK = 128


@triton.jit(do_not_specialize=["levels"])
def best_children_kernel(
    own,  # [B, S, C] float32
    tokens,  # [B, S, C] int64
    root,  # [B] int64
    gates,  # [B, S, r]
    predecessor,  # [V, r]
    successor,  # [V, r]
    temperatures,  # [B] float32
    logp,  # [B, S, P, K] float32
    children,  # [B, S, P, K] int64
    levels,  # S
    stride_temperature,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    C: tl.constexpr,
    PADDED: tl.constexpr,
    K: tl.constexpr,
    WEIGHT: tl.constexpr,  # of logits where there is noise; 0: there is none
    PDL: tl.constexpr,
):
    level, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = b * levels + level
    c, i = tl.arange(0, PADDED), tl.arange(0, RANK_BLOCK)
    ok_C = c < C
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token_C = tl.load(tokens + row * C + c, mask=ok_C, other=0)
    before_P = tl.load(tokens + (row - 1) * C + c, mask=ok_C & (level > 0), other=0)
    if level == 0:
        before_P = tl.zeros_like(before_P) + tl.load(root + b)
    added_PC = tl.zeros([PADDED, PADDED], tl.float32)
    for start in range(0, RANK, RANK_BLOCK):
        at_r = start + i
        ok_r = at_r < RANK
        ok_Cr = ok_C[:, None] & ok_r[None, :]
        gate_r = tl.load(gates + row * RANK + at_r, mask=ok_r, other=0.0).to(tl.float32)
        before_Pr = tl.load(predecessor + before_P[:, None] * RANK + at_r[None, :], mask=ok_Cr, other=0.0).to(tl.float32)
        after_Cr = tl.load(successor + token_C[:, None] * RANK + at_r[None, :], mask=ok_Cr, other=0.0).to(tl.float32)
        added_PC += tl.dot(before_Pr * gate_r[None, :], tl.trans(after_Cr), input_precision="ieee")
    if WEIGHT > 0:
        added_PC *= tl.where(tl.load(temperatures + b * stride_temperature) > 0, WEIGHT, 1.0)
    score_PC = tl.load(own + row * C + c, mask=ok_C, other=0.0)[None, :] + added_PC
    score_PC = tl.where((score_PC != score_PC) | ~ok_C[None, :], -float("inf"), score_PC)
    best_P = tl.max(score_PC, 1)
    total_P = best_P + tl.log(tl.sum(tl.exp(score_PC - best_P[:, None]), 1))
    other_PCC, this_PCC = score_PC[:, None, :], score_PC[:, :, None]
    is_first_CC = c[None, :] < c[:, None]
    is_better_PCC = (other_PCC > this_PCC) | ((other_PCC == this_PCC) & is_first_CC[None, :, :])
    place_PC = tl.sum(is_better_PCC.to(tl.int32), 2)
    at_PC = (row * C + c[:, None]) * K + place_PC
    ok_PC = ok_C[:, None] & ok_C[None, :] & (place_PC < K)
    tl.store(logp + at_PC, score_PC - total_P[:, None], mask=ok_PC)
    tl.store(children + at_PC, tl.broadcast_to(c[None, :], (PADDED, PADDED)).to(tl.int64), mask=ok_PC)


def launch_best_children(
    own_BSC: Tensor,
    tokens_BSC: Tensor,
    root_B: Tensor,
    gates_BSr: Tensor,
    predecessor_Vr: Tensor,
    successor_Vr: Tensor,
    children: int,
    noise: Noise | None = None,
) -> tuple[Tensor, Tensor]:
    """`children.best_children`."""
    (B, S, C), r = own_BSC.shape, gates_BSr.shape[2]
    assert own_BSC.is_contiguous() and tokens_BSC.is_contiguous() and root_B.is_contiguous() and gates_BSr.is_contiguous()
    assert predecessor_Vr.is_contiguous() and successor_Vr.is_contiguous() and predecessor_Vr.shape == successor_Vr.shape
    assert own_BSC.dtype == torch.float32 and predecessor_Vr.shape[1] == r and 0 < children <= C
    logp_BSPK = torch.empty(B, S, C, children, dtype=torch.float32, device=own_BSC.device)
    at_BSPK = torch.empty(B, S, C, children, dtype=torch.int64, device=own_BSC.device)
    temperature_B = own_BSC if noise is None else noise.temperature_B
    best_children_kernel[(S, B)](
        own_BSC, tokens_BSC, root_B, gates_BSr, predecessor_Vr, successor_Vr, temperature_B, logp_BSPK, at_BSPK, S,
        temperature_B.stride(0), RANK=r, RANK_BLOCK=RANK_BLOCK, C=C, PADDED=max(16, triton.next_power_of_2(C)), K=children,
        WEIGHT=0.0 if noise is None else noise.logit_weight, num_warps=8, **chained(own_BSC.device),
    )  # fmt: skip
    return logp_BSPK, at_BSPK
