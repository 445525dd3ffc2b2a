"""The kernel of own_pairs.py, in one launch.

Order of chained launches (specdec/ops/launch.py): the kernel reads nothing before its wait, and triggers after it.

Shapes: P = tokens * top_k pairs, B rows of the batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained

if TYPE_CHECKING:
    from specdec.ops.products.own_pairs import LiveRows

BLOCK = 256


@triton.jit(do_not_specialize=["pairs"])
def own_pairs_kernel(
    topk_weights,  # [P]
    topk_ids,  # [P] int64
    active,  # [B] int32, if HAS_ROWS
    last,  # [B] int64, if HAS_LAST
    own_weights,  # [P]
    own_ids,  # [P] int64
    pairs, FIRST: tl.constexpr, COUNT: tl.constexpr, TOP_K: tl.constexpr, COLUMNS: tl.constexpr, HAS_ROWS: tl.constexpr,
    HAS_LAST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number_P = tl.load(topk_ids + p, mask=p < pairs, other=0) - FIRST
    is_own_P = (number_P >= 0) & (number_P < COUNT)
    if HAS_ROWS:
        token_P = p // TOP_K
        is_own_P &= tl.load(active + token_P // COLUMNS, mask=p < pairs, other=0) != 0
        if HAS_LAST:
            is_own_P &= token_P % COLUMNS <= tl.load(last + token_P // COLUMNS, mask=p < pairs, other=0)
    weight_P = tl.load(topk_weights + p, mask=p < pairs, other=0.0)
    tl.store(own_weights + p, tl.where(is_own_P, weight_P, 0.0), mask=p < pairs)
    tl.store(own_ids + p, tl.where(is_own_P, number_P, COUNT), mask=p < pairs)


def launch_own_pairs(
    topk_weights_TK: Tensor, topk_ids_TK: Tensor, own: range, live: LiveRows | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See own_pairs.py.  All tensors are contiguous."""
    given = [topk_weights_TK, topk_ids_TK, *(each for each in live or () if each is not None)]
    assert all(each.is_contiguous() for each in given) and topk_weights_TK.shape == topk_ids_TK.shape
    weights_TK, ids_TK, pairs = torch.empty_like(topk_weights_TK), torch.empty_like(topk_ids_TK), topk_ids_TK.numel()
    columns = len(topk_ids_TK) // len(live.active_B) if live else 1
    last_B = live.last_B if live and columns > 1 else None
    own_pairs_kernel[(triton.cdiv(pairs, BLOCK),)](
        topk_weights_TK, topk_ids_TK, live.active_B if live else topk_ids_TK, topk_ids_TK if last_B is None else last_B,
        weights_TK, ids_TK, pairs, FIRST=own.start, COUNT=len(own), TOP_K=topk_ids_TK.shape[1], COLUMNS=columns,
        HAS_ROWS=live is not None, HAS_LAST=last_B is not None, BLOCK=BLOCK, num_warps=4, **chained(topk_weights_TK.device),
    )  # fmt: skip
    return weights_TK, ids_TK
