"""The kernel of lookup.py: one program for each sequence and block of positions, which keeps the block's best places.

Programs of blocks after a text's end do nothing, so the time follows the texts' lengths and not the longest one allowed.

Shapes: B sequences, X places kept of all blocks together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.attention.kernels.tables_triton import slots_of
from specdec.draft.ngram.lookup import FAR, MAX_MATCH, SHIFT, PagedTexts

BLOCK = 1024


@triton.jit
def nearness(apart, MOST: tl.constexpr):
    """int64: `lookup.nearness`."""
    return MOST - 2 * tl.abs(apart) + (apart > 0).to(tl.int64)


@triton.jit(do_not_specialize=["stride_row", "span"], do_not_specialize_on_alignment=["page_table", "lens", "back"])
def match_keys_kernel(
    page_table,  # [B, pages] int32
    lens,  # [B] int32
    back,  # [B] int64
    tokens,  # [slots] int32
    keys,  # [B, blocks, COUNT] int64
    stride_row,
    span,
    COUNT: tl.constexpr,
    MAX_LENGTH: tl.constexpr,  # MAX_MATCH
    BITS: tl.constexpr,  # SHIFT
    MOST: tl.constexpr,  # FAR
    PAGE_SIZE: tl.constexpr,
    SIZE: tl.constexpr,  # BLOCK
):
    b, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    length = tl.load(lens + b)
    first = tl.maximum(length - span, 0)
    page_table += b * stride_row
    position = block * SIZE + tl.arange(0, SIZE)
    is_place = (position >= first) & (position < length - 1)
    key = tl.full([SIZE], -1, tl.int64)
    if (block * SIZE < length - 1) & (block * SIZE + SIZE > first):
        equal, matched = is_place, tl.zeros([SIZE], tl.int32)
        for step in range(MAX_LENGTH):
            end = length - 1 - step
            last = tl.load(tokens + slots_of(page_table, tl.maximum(end, 0), True, PAGE_SIZE))
            before = position - step
            equal = equal & (before >= first)
            equal = equal & (tl.load(tokens + slots_of(page_table, before, equal, PAGE_SIZE), mask=equal, other=-1) == last)
            matched += equal.to(tl.int32)
        near = nearness(position - (length - 1 - tl.load(back + b)), MOST)
        key = tl.where(is_place, (matched.to(tl.int64) << BITS) | near, -1)
    keys += (b * tl.num_programs(1) + block) * COUNT
    for k in range(COUNT):
        best = tl.max(key, 0)
        tl.store(keys + k, best)
        key = tl.where(key == best, -1, key)


def launch_match_keys(text: PagedTexts, back_B: Tensor, count: int, block: int = BLOCK) -> Tensor:
    """[B, X] int64: the best `count` of each block's `lookup.match_keys`.

    The launch is not chained: it reads what the round before has written.
    """
    pages = text.pages
    B, blocks = pages.rows, triton.cdiv(pages.capacity, block)
    assert pages.table.stride(1) == 1 and count <= block and back_B.is_contiguous()
    keys = torch.empty(B, blocks, count, dtype=torch.int64, device=text.lens_B.device)
    match_keys_kernel[(B, blocks)](
        pages.table, text.lens_B, back_B, text.tokens_N, keys, pages.table.stride(0),
        pages.capacity if text.span is None else text.span,
        COUNT=count, MAX_LENGTH=MAX_MATCH, BITS=SHIFT, MOST=FAR, PAGE_SIZE=pages.page_size, SIZE=block, num_warps=8,
    )  # fmt: skip
    return keys.flatten(1)
