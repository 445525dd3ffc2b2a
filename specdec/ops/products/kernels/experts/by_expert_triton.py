"""The kernel of experts.py's `by_expert`: pairs of a token and an expert sorted by expert, in one launch.

There is a program for each expert, and one for pairs that are skipped.  Each reads all numbers of experts, counts those below
its own, and writes its pairs after so many, in their order.  Pairs are a few thousand, so that reading them costs little.

Order of chained launches (specdec/ops/launch.py): the kernel reads nothing before its wait, and triggers after it.

Shapes: P pairs, E experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained

SIZES = 512, 4096, 8192  # pairs, padded: few sizes, for each of which the kernel is compiled


@triton.jit(do_not_specialize=["pairs"])
def by_expert_kernel(
    topk_ids,  # [P] int64: from 0 to E
    order,  # [P] int64
    counts,  # [E] int32
    pairs, EXPERTS: tl.constexpr, PADDED_PAIRS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, p = tl.program_id(0), tl.arange(0, PADDED_PAIRS)
    id_P = tl.load(topk_ids + p, mask=p < pairs, other=EXPERTS + 1).to(tl.int32)
    is_own_P = (id_P == expert).to(tl.int32)
    first = tl.sum((id_P < expert).to(tl.int32), 0)
    tl.store(order + first + tl.cumsum(is_own_P, 0) - 1, p.to(tl.int64), mask=is_own_P == 1)
    if expert < EXPERTS:
        tl.store(counts + expert, tl.sum(is_own_P, 0))


def launch_by_expert(topk_ids_P: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """See `experts.by_expert`, of at most SIZES[-1] pairs."""
    P, device = topk_ids_P.shape[0], topk_ids_P.device
    assert 0 < P <= SIZES[-1] and topk_ids_P.is_contiguous() and topk_ids_P.dtype == torch.int64
    order_P = torch.empty(P, dtype=torch.int64, device=device)
    counts_E = torch.empty(experts, dtype=torch.int32, device=device)
    by_expert_kernel[(experts + 1,)](
        topk_ids_P, order_P, counts_E, P, EXPERTS=experts, PADDED_PAIRS=next(size for size in SIZES if P <= size),
        num_warps=4 if P <= SIZES[0] else 8,
        **chained(device),
    )  # fmt: skip
    return order_P, counts_E
