"""The kernel of pairs.py: one program for each pair and block of its feature.

Shapes: B rows, E emitted tokens of a row with padding, W pairs of a row, H hidden.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.ops.launch import chained


@triton.jit(do_not_specialize=["emitted", "pairs", "mask_id"])
def fill_pairs_kernel(
    tokens,  # [B, E] int64
    last,  # [B] int64
    fused,  # [B, E, H]
    mask,  # [H]
    ids,  # [B, W] int64
    features,  # [B, W, H]
    emitted,  # E
    pairs,  # W
    mask_id,
    stride_b,  # of tokens
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    r = tl.program_id(0).to(tl.int64)
    b, w = r // pairs, r % pairs
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok_H = h < SIZE
    unknown_H = tl.load(mask + h, mask=ok_H)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    is_true = (w <= tl.load(last + b)) & (w < emitted)
    known_H = tl.load(fused + (b * emitted + w) * SIZE + h, mask=ok_H & is_true)
    tl.store(features + r * SIZE + h, tl.where(is_true, known_H, unknown_H), mask=ok_H)
    if tl.program_id(1) == 0:
        token = tl.load(tokens + b * stride_b + w, mask=is_true, other=0)
        tl.store(ids + r, tl.where(is_true, token, mask_id.to(tl.int64)))


def launch_fill_pairs(
    tokens_BE: Tensor, last_B: Tensor, fused_BEH: Tensor, mask_id: int, mask_1H: Tensor, pairs: int
) -> tuple[Tensor, Tensor]:
    """`pairs.fill_pairs`."""
    (B, E), H = tokens_BE.shape, fused_BEH.shape[2]
    assert fused_BEH.is_contiguous() and mask_1H.is_contiguous() and tokens_BE.stride(1) == 1 and last_B.is_contiguous()
    ids_BW = torch.empty(B, pairs, dtype=torch.int64, device=last_B.device)
    features_BWH = fused_BEH.new_empty(B, pairs, H)
    fill_pairs_kernel[(B * pairs, triton.cdiv(H, 1024))](
        tokens_BE, last_B, fused_BEH, mask_1H, ids_BW, features_BWH, E, pairs, mask_id, tokens_BE.stride(0),
        SIZE=H, BLOCK=1024, num_warps=4, **chained(last_B.device),
    )  # fmt: skip
    return ids_BW, features_BWH
