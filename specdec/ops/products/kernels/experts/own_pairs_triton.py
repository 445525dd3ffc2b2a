"""The kernel of own_pairs.py, in one launch.

Order of chained launches (specdec/ops/launch.py): the kernel reads nothing before its wait, and triggers after it.

Shapes: P = tokens * top_k pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained

BLOCK = 256


@triton.jit(do_not_specialize=["pairs"])
def own_pairs_kernel(
    topk_weights,  # [P]
    topk_ids,  # [P] int64
    own_weights,  # [P]
    own_ids,  # [P] int64
    pairs, FIRST: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number_P = tl.load(topk_ids + p, mask=p < pairs, other=0) - FIRST
    is_own_P = (number_P >= 0) & (number_P < COUNT)
    weight_P = tl.load(topk_weights + p, mask=p < pairs, other=0.0)
    tl.store(own_weights + p, tl.where(is_own_P, weight_P, 0.0), mask=p < pairs)
    tl.store(own_ids + p, tl.where(is_own_P, number_P, COUNT), mask=p < pairs)


def launch_own_pairs(topk_weights_TK: Tensor, topk_ids_TK: Tensor, own: range) -> tuple[Tensor, Tensor]:
    """See own_pairs.py.  Both tensors are contiguous."""
    assert topk_weights_TK.is_contiguous() and topk_ids_TK.is_contiguous() and topk_weights_TK.shape == topk_ids_TK.shape
    weights_TK, ids_TK, pairs = torch.empty_like(topk_weights_TK), torch.empty_like(topk_ids_TK), topk_ids_TK.numel()
    own_pairs_kernel[(triton.cdiv(pairs, BLOCK),)](
        topk_weights_TK, topk_ids_TK, weights_TK, ids_TK, pairs, FIRST=own.start, COUNT=len(own), BLOCK=BLOCK, num_warps=4,
        **chained(topk_weights_TK.device),
    )  # fmt: skip
    return weights_TK, ids_TK
