"""The kernel of masks.py: one program for each row of logits and block of the vocabulary.

Shapes: B sequences, N rows of logits of each, R = B * N, W a run of the vocabulary, G masked sequences, X words of a mask.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.batch.grammars.masks import BitMasks
from specdec.ops.launch import chained

BLOCK = 2048


@triton.jit(do_not_specialize=["nodes", "first", "width"])
def masked_logits_kernel(
    logits,  # [R, W]
    words,  # [G, N, X] int32
    place,  # [B] int32
    out,  # [R, W] float32
    nodes,  # N
    first,
    width,  # W
    stride_logits,
    stride_words,  # of a mask: X
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(logits + row * stride_logits + column, mask=inside).to(tl.float32)
    masked = tl.load(place + row // nodes).to(tl.int64)
    token = first + column
    mask = (masked * nodes + row % nodes) * stride_words
    word = tl.load(words + mask + (token >> 5), mask=inside & (masked >= 0), other=-1)
    tl.store(out + row * width + column, tl.where((word >> (token & 31)) & 1 > 0, x, -float("inf")), mask=inside)


def launch_masked_logits(logits_RW: Tensor, masks: BitMasks, first: int) -> Tensor:
    """`masks.masked_logits`: [R, W] float32."""
    R, W = logits_RW.shape
    out = torch.empty(R, W, dtype=torch.float32, device=logits_RW.device)
    assert masks.place_B.shape[0] * masks.words_GNX.shape[1] == R and masks.words_GNX.is_contiguous()
    assert logits_RW.stride(1) == 1 and masks.place_B.is_contiguous()
    if out.numel():
        masked_logits_kernel[(R, triton.cdiv(W, BLOCK))](
            logits_RW, masks.words_GNX, masks.place_B, out, masks.words_GNX.shape[1], first, W,
            logits_RW.stride(0), masks.words_GNX.shape[2],
            BLOCK=BLOCK, num_warps=8, **chained(logits_RW.device),
        )  # fmt: skip
    return out
